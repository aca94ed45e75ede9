from __future__ import annotations

import json
import logging
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tagc.record import Recorder, build_manifest
from tagc.record.wandb_mirror import WandbMirror, resolve_mode


def read_offline_run(path: Path) -> list:
    """Records of a W&B transaction log: protobuf messages in the LevelDB log format behind a 7-byte file header."""
    from wandb.proto import wandb_internal_pb2

    data, position, records, message = path.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            records.append(record)
            message = b""
    return records


def kind_of(record) -> str:
    return record.WhichOneof("record_type")


def as_dict(items) -> dict:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def run_offline(config, run_dir: Path, rows: list[dict], **options) -> tuple[Recorder, list, float]:
    started = time.perf_counter()
    recorder = Recorder(run_dir, config, build_manifest(config, kernels="reference", device="cpu"), **options)
    started_s = time.perf_counter() - started
    with recorder:
        for row in rows:
            recorder.step(row)
    (log,) = run_dir.glob(f"wandb/offline-run-*/run-{recorder.manifest['wandb_run_id']}.wandb")
    deadline = time.monotonic() + 20
    # wandb's own process writes the file; the end may reach it a moment after finish() returned.
    while "exit" not in map(kind_of, records := read_offline_run(log)):
        assert time.monotonic() < deadline, "the offline run was never ended"
        time.sleep(0.05)
    return recorder, records, started_s


def test_an_offline_run_mirrors_the_rows_and_is_resumed_under_its_id(config, make_row, tmp_path, caplog) -> None:
    config.logging.wandb, config.experiment, config.logging.wandb_tags = "offline", "paper", ["a", "b"]
    rows = [make_row(step) for step in range(1, 4)]
    with caplog.at_level(logging.WARNING, "tagc"):
        recorder, records, started_s = run_offline(config, tmp_path, rows)
    assert caplog.text == ""
    assert started_s < 1.0  # wandb.init alone takes about that long; it must not hold up training
    (run,) = (record.run for record in records if kind_of(record) == "run")
    assert (run.run_id, run.run_group, list(run.tags)) == (recorder.manifest["wandb_run_id"], "paper", ["a", "b"])
    assert as_dict(run.config.update)["compressor.sparsity"] == 0.8
    history = [as_dict(record.history.item) for record in records if kind_of(record) == "history"]
    assert [{key: logged[key] for key in rows[0]} for logged in history] == rows
    summary = {}
    for record in records:
        if kind_of(record) == "summary":
            summary |= as_dict(record.summary.update)
    assert (summary["status"], summary["compressor"], summary["iteration_ms_median"]) == ("done", "tagc2", 1000)
    assert any(record.metric.step_metric == "step" for record in records)

    for folder in tmp_path.glob("wandb/offline-run-*"):
        folder.rename(tmp_path / "first")  # one log per start; a second start in the same second shares the name
    resumed, records, _ = run_offline(config, tmp_path, [make_row(4)], resume_step=3)
    assert resumed.manifest["wandb_run_id"] == recorder.manifest["wandb_run_id"]
    assert [record.run.run_id for record in records if kind_of(record) == "run"] == [run.run_id]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failing_wandb_costs_one_warning(config, make_row, tmp_path, monkeypatch, caplog, where) -> None:
    import wandb

    class Run:
        def __init__(self) -> None:
            self.summary: dict = {}

        def define_metric(self, *args, **options) -> None: ...

        def log(self, row: dict) -> None:
            if where == "log":
                raise OSError("broken pipe")

        def finish(self, exit_code: int) -> None:
            if where == "finish":
                raise SystemExit(3)

    def init(**options) -> Run:
        if where == "init":
            raise wandb.errors.CommError("no route\nto host")
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    config.logging.wandb = "offline"
    with caplog.at_level(logging.WARNING, "tagc"):
        with Recorder(tmp_path, config, build_manifest(config, kernels="reference", device="cpu")) as recorder:
            for step in range(1, 6):
                recorder.step(make_row(step))
        assert len(caplog.records) == 1
    assert "W&B does not mirror this run" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_a_wandb_that_hangs_is_left_behind(config, make_row, tmp_path, monkeypatch, caplog) -> None:
    import wandb

    release = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **options: release.wait(20) and None)
    config.logging.wandb = "offline"
    mirror = WandbMirror(tmp_path, config, "abc")
    started = time.perf_counter()
    mirror.log(make_row(1))
    assert time.perf_counter() - started < 0.1
    with caplog.at_level(logging.WARNING, "tagc"):
        mirror.finish({}, timeout_s=0.2)
    assert time.perf_counter() - started < 5
    assert "did not finish within" in caplog.text
    release.set()


def test_online_without_a_key_never_asks_on_the_terminal(config, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for a key"))
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **options: options["prompt"])
    monkeypatch.setattr(wandb, "init", lambda **options: pytest.fail("init would ask for a key"))
    config.logging.wandb = "online"
    with caplog.at_level(logging.WARNING, "tagc"):
        WandbMirror(tmp_path, config, "abc").finish({})
    assert "no API key: set WANDB_API_KEY" in caplog.text


def test_disabled_does_not_import_wandb(tmp_path) -> None:
    program = (
        "import sys; from pathlib import Path; from tagc.config import Config; import tagc.record as r\n"
        "c = Config(); c.logging.wandb = 'disabled'\n"
        "with r.Recorder(Path(sys.argv[1]), c, r.build_manifest(c, kernels='reference', device='cpu')) as recorder:\n"
        "    recorder.step({'step': 1})\n"
        "assert 'wandb' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=root, timeout=60)
    assert not (tmp_path / "wandb").exists()


def test_the_mode(monkeypatch) -> None:
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert resolve_mode("auto") == "online"
    assert [resolve_mode(mode) for mode in ("online", "offline", "disabled")] == ["online", "offline", "disabled"]
