"""The mirror as training sees it: a process beside the ranks that may fail, hang or be killed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tagc.errors import UserError
from tagc.launch.launcher import launch
from tagc.record import Recorder, build_manifest
from tagc.record.wandb import mirror, process, run
from tagc.record.wandb.mirror import WandbMirror, check_options, resolve_mode
from tests.record.wandb.offline_log import history_of, read_log

WARNING = "W&B does not mirror this run"


def record_run(config, run_dir: Path, rows: list[dict], **options) -> Recorder:
    with Recorder(run_dir, config, build_manifest(config, kernels="reference", device="cpu"), **options) as recorder:
        for row in rows:
            recorder.layers([{"step": row["step"], "layer": f"blocks.{i}", "density": 0.1 + i} for i in range(2)])
            recorder.step(row)
    return recorder


def replace_process(monkeypatch, program: str) -> None:
    """Let the mirror run ``program`` in place of the process that talks to W&B."""
    monkeypatch.setattr(mirror, "build_command", lambda run_dir, mode: [sys.executable, "-c", program])


def test_an_offline_run_repeats_the_rows_and_is_rewritten_whole_when_resumed(config, make_row, tmp_path, caplog):
    config.logging.wandb, config.experiment, config.logging.wandb_tags = "offline", "paper", ["a", "b"]
    with caplog.at_level(logging.WARNING, "tagc"):
        first = record_run(config, tmp_path, [make_row(step) for step in range(1, 6)])
        changed = [make_row(step, train_loss=1.0) for step in range(4, 7)]  # other ranks: rows 4 and 5 differ
        resumed = record_run(config, tmp_path, changed, resume_step=3)
    assert caplog.text == ""
    run_id = resumed.manifest["wandb_run_id"]
    assert run_id == first.manifest["wandb_run_id"]
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = read_log(log)
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["run_id"], run["run_group"], run["tags"]) == (run_id, "paper", ["a", "b"])
    facts = run["config"]["update"]
    assert (facts["compressor.sparsity"], facts["bandwidth.label"], facts["manifest.device"]) == (
        0.8,
        "unlimited",
        "cpu",
    )
    history = history_of(records)
    assert [row["_step"] for row in history] == list(range(1, 7))
    assert [{key: row[key] for key in make_row(1)} for row in history] == [
        *(make_row(step) for step in range(1, 4)),
        *changed,
    ]
    assert history[-1]["train_time_s"] == 6.0
    assert history[-1]["layers/blocks.1/density"] == 1.1
    assert sum(history[-1]["histograms/density.values"]) == 2
    summary: dict = {}
    for record in records:
        summary |= record["summary"]["update"] if record["type"] == "summary" else {}
    assert (summary["status"], summary["compressor"], summary["iteration_ms_median"]) == ("done", "tagc2", 1000)
    assert records[-1]["exit"]["exit_code"] == 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('no route'); raise SystemExit(1)", "no route"),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed"),
    ],
)
def test_a_failing_process_costs_one_warning(config, make_row, tmp_path, monkeypatch, caplog, program, reason):
    replace_process(monkeypatch, program)
    config.logging.wandb = "offline"
    with caplog.at_level(logging.WARNING, "tagc"):
        record_run(config, tmp_path, [make_row(step) for step in range(1, 6)])
    (warning,) = caplog.messages
    assert WARNING in warning and reason in warning
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_the_warnings_of_slurm_do_not_end_the_process(tmp_path, monkeypatch, caplog):
    """SIGTERM and SIGUSR1 reach all processes of a SLURM step; the ranks save, and their last rows are passed on."""
    program = "import os, signal, sys; [os.kill(os.getpid(), n) for n in (signal.SIGTERM, signal.SIGUSR1)]; sys.exit(9)"
    replace_process(monkeypatch, program)
    with caplog.at_level(logging.WARNING, "tagc"):
        mirror = WandbMirror(tmp_path, "offline")
        mirror._watcher.join(20)
    assert mirror._process is not None and mirror._process.returncode == 9


@pytest.fixture
def hanging_mirror(tmp_path, monkeypatch):
    """A mirror that hangs as soon as its service has started, and the service, which is stopped."""
    service = "subprocess.Popen(['sleep', '600'], start_new_session=True).send_signal(signal.SIGSTOP)"
    hang = f"import signal, subprocess, time; {service}; time.sleep(600)"
    program = "import threading; from tagc.record.wandb import process as p; p.END_TIMEOUT_S = 0.2"
    replace_process(monkeypatch, f"{program}; threading.Thread(target=p.end_after_ranks, daemon=True).start(); {hang}")
    mirror = WandbMirror(tmp_path, "online")
    children = Path(f"/proc/{mirror._process.pid}/task/{mirror._process.pid}/children")
    wait_until(lambda: children.read_text())
    return mirror, int(children.read_text())


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs or is stopped; a dead one may wait for whoever adopted it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_mirror_that_hangs_is_left_behind_and_ended_with_its_service(hanging_mirror, monkeypatch, caplog):
    mirror, service = hanging_mirror
    monkeypatch.setattr("tagc.record.wandb.mirror.FINISH_TIMEOUT_S", 0.05)
    process = mirror._process
    with caplog.at_level(logging.WARNING, "tagc"):
        mirror.finish("done")
    assert process.wait(20) == -9
    wait_until(lambda: not is_alive(service))
    (warning,) = caplog.messages
    assert WARNING in warning and "did not finish" in warning


def test_a_mirror_that_hangs_ends_when_the_ranks_are_gone(hanging_mirror):
    mirror, service = hanging_mirror
    mirror._process.stdin.close()  # what the kernel does when a rank is killed
    assert mirror._process.wait(20) == -9
    wait_until(lambda: not is_alive(service))


def test_a_folder_that_cannot_be_written_costs_one_warning(config, make_row, tmp_path, caplog):
    (tmp_path / "wandb").write_text("in the way")
    config.logging.wandb = "offline"
    with caplog.at_level(logging.WARNING, "tagc"):
        record_run(config, tmp_path, [make_row(1)])
    (warning,) = caplog.messages
    assert WARNING in warning and "File exists" in warning


def test_a_full_disk_costs_one_warning(config, make_row, tmp_path, caplog):
    folder = tmp_path / "wandb"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        config.logging.wandb = "offline"
        with caplog.at_level(logging.WARNING, "tagc"):
            record_run(config, tmp_path, [make_row(1)])
    finally:
        subprocess.run(["umount", folder], check=True)
    (warning,) = caplog.messages
    assert WARNING in warning and "no space left" in warning
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_no_process_at_all_costs_one_warning(config, make_row, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mirror, "build_command", lambda run_dir, mode: [str(tmp_path / "nothing")])
    config.logging.wandb = "offline"
    with caplog.at_level(logging.WARNING, "tagc"):
        record_run(config, tmp_path, [make_row(1)])
    (warning,) = caplog.messages
    assert WARNING in warning and "No such file" in warning


def test_whatever_wandb_raises_is_a_reason_in_one_line(config, make_row, tmp_path, monkeypatch, capsys):
    def open_run(*_) -> None:
        raise SystemExit("no route\nto host")

    config.logging.wandb = "disabled"
    record_run(config, tmp_path, [make_row(1)])
    monkeypatch.setattr(process, "open_run", open_run)
    monkeypatch.setattr(process, "NICENESS", 0)
    monkeypatch.setattr(sys, "argv", ["process", str(tmp_path), "online"])
    assert process.main() == 1
    assert capsys.readouterr().out == "no route to host\n"


def test_online_without_a_key_never_asks_on_the_terminal(config, make_row, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for a key"))
    monkeypatch.setattr(wandb, "login", lambda **options: options["prompt"])
    monkeypatch.setattr(wandb, "init", lambda **options: pytest.fail("init would ask for a key"))
    record_run(config, tmp_path, [make_row(1)])
    with pytest.raises(Exception, match="set WANDB_API_KEY"):
        run.open_run(tmp_path, "online", tmp_path, 1.0)


def test_recording_does_not_import_wandb_nor_reading_a_record_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tagc.config import Config; import tagc.record as r\n"
        "r.wandb.mirror.build_command = lambda run_dir, mode: ['true']\n"
        "with r.Recorder(Path(sys.argv[1]), Config(), {'wandb_mode': 'offline', 'wandb_run_id': 'i'}) as recorder:\n"
        "    recorder.step({'step': 1})\n"
        "import tagc.record.wandb.process, tagc.record.wandb.sync\n"
        "assert not {'wandb', 'torch'} & sys.modules.keys()\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=root, timeout=300)


def test_the_mode(monkeypatch):
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert resolve_mode("auto") == "online"
    for mode in ("online", "offline", "disabled"):
        assert resolve_mode(mode) == mode
        monkeypatch.setenv("WANDB_MODE", mode)
        assert resolve_mode("auto") == mode


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({"WANDB_MODE": "dryrun"}, "offline"),
        ({"WANDB_MODE": "offline "}, "offline"),
        ({"WANDB_MODE": "run"}, "online"),
        ({"WANDB_MODE": ""}, "online"),
        ({"WANDB_DISABLED": "true"}, "disabled"),
        ({"WANDB_DISABLED": "false", "WANDB_MODE": " Offline"}, "offline"),
    ],
)
def test_the_variables_mean_what_they_mean_to_wandb(monkeypatch, variables, mode):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    assert resolve_mode("auto") == mode


@pytest.mark.parametrize(
    ("options", "mode", "parts"),
    [
        ({}, "of-line", ("WANDB_MODE='of-line'", "online")),
        ({"wandb_tags": ["a", "t" * 76]}, "", ("logging.wandb_tags", "76", "64")),
        ({"wandb_tags": [""]}, "", ("logging.wandb_tags", "0 characters")),
        ({"wandb_project": "a/b"}, "", ("logging.wandb_project='a/b'", "none of")),
        ({"wandb_project": "p" * 129}, "", ("logging.wandb_project", "128")),
    ],
)
def test_what_wandb_would_refuse_is_refused_before_the_run(config, tmp_path, monkeypatch, options, mode, parts):
    monkeypatch.setenv("WANDB_MODE", mode)
    config.logging.wandb = "auto"
    for key, value in options.items():
        setattr(config.logging, key, value)
    with pytest.raises(UserError) as error:
        launch(config, tmp_path / "run")
    assert all(part in str(error.value) for part in parts)
    assert not (tmp_path / "run").exists()
    config.logging.wandb = "disabled"
    check_options(config.logging)


def test_the_limits_are_those_of_the_installed_wandb(config):
    import wandb

    config.logging.wandb = "offline"
    for key, good, bad in (("tags", "t" * 64, "t" * 65), ("project", "p" * 128, "p" * 129), ("project", "a", "a%")):
        for value in (good, bad):
            setattr(config.logging, f"wandb_{key}", [value] if key == "tags" else value)
            name = "run_tags" if key == "tags" else "project"
            with nullcontext() if value == good else pytest.raises(UserError):
                check_options(config.logging)
            with nullcontext() if value == good else pytest.raises(Exception, match="character"):
                wandb.Settings(**{name: [value] if key == "tags" else value})
        setattr(config.logging, f"wandb_{key}", ["ok"] if key == "tags" else "ok")
