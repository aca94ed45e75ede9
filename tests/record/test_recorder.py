from __future__ import annotations

import json
from pathlib import Path

import pytest

from tagc.errors import UserError
from tagc.host.files import write_text_atomic
from tagc.launch.folder import write_failed_summary
from tagc.record import (
    NullRecorder,
    Recorder,
    build_manifest,
    final_table,
    load_rows,
    load_summary,
    setup_logging,
)
from tagc.record.rows import MetricsFile, rewrite_rows
from tagc.train.resume import prepare_start


@pytest.fixture
def open_recorder(config):
    def open_in(run_dir: Path, **options) -> Recorder:
        return Recorder(run_dir, config, build_manifest(config, kernels="reference", device="cpu"), **options)

    return open_in


def test_a_run_folder(open_recorder, make_row, tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "b"
    setup_logging(run_dir, rank=0)
    with open_recorder(run_dir) as recorder:
        for step in range(1, 11):
            recorder.step(make_row(step))
        recorder.log("bucket [red]3[/red] goes dense, 100% of it")
        summary = recorder.finish("done", {"note": "x"})
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "log.txt"}
    assert load_rows(run_dir / "metrics.jsonl") == [make_row(step) for step in range(1, 11)]
    assert summary == load_summary(run_dir)
    assert (summary["status"], summary["note"], summary["steps"]) == ("done", "x", 10)
    assert summary["iteration_ms_median"] == 1000
    assert "INFO bucket [red]3[/red] goes dense, 100% of it" in (run_dir / "log.txt").read_text()


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("rank 1 died"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_exception_is_recorded_and_goes_on(open_recorder, make_row, tmp_path: Path, error, status) -> None:
    with pytest.raises(type(error)), open_recorder(tmp_path) as recorder:
        recorder.step(make_row(1))
        raise error
    summary = load_summary(tmp_path)
    assert (summary["status"], summary["steps"]) == (status, 1)
    assert summary["error"].startswith(type(error).__name__)


def test_a_failure_after_the_end_is_a_failure(open_recorder, make_row, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_recorder(tmp_path) as recorder:
        recorder.step(make_row(1))
        recorder.finish("done")
        raise RuntimeError("checkpoint")
    assert load_summary(tmp_path)["status"] == "failed"


def test_leaving_without_finish_is_done(open_recorder, make_row, tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        recorder.step(make_row(1))
    assert load_summary(tmp_path)["status"] == "done"


def test_a_non_finite_extra_stays_json(open_recorder, tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        recorder.finish("failed", {"bad": float("nan")})
    assert load_summary(tmp_path)["bad"] is None


def test_an_earlier_record_is_set_aside_whole(open_recorder, make_row, tmp_path: Path) -> None:
    for seed_loss in (1.0, 2.0, 3.0):
        with open_recorder(tmp_path) as recorder:
            recorder.step(make_row(1, train_loss=seed_loss))
    assert [row["train_loss"] for row in load_rows(tmp_path / "metrics.jsonl")] == [3.0]
    for number in (1, 2):
        folder = tmp_path / "earlier" / str(number)
        assert [row["train_loss"] for row in load_rows(folder / "metrics.jsonl")] == [float(number)]
        assert (folder / "manifest.json").exists() and load_summary(folder)["status"] == "done"
    assert "earlier_starts" not in recorder.manifest


def test_a_resumed_record_continues_after_the_step(open_recorder, make_row, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_recorder(tmp_path) as first:
        for step in range(1, 6):
            first.layers([{"step": step, "layer": name, "threshold": 1.0} for name in ("wte", "head")])
            first.step(make_row(step, train_loss=1.0))
        raise RuntimeError("killed")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tr')
    resumed = open_recorder(tmp_path, resume_step=3)
    assert not (tmp_path / "summary.json").exists()  # `failed` is no longer true
    with resumed:
        for step in range(4, 8):
            resumed.layers([{"step": step, "layer": "head", "threshold": float("nan")}] if step == 5 else [])
            resumed.step(make_row(step, train_loss=2.0))
    rows = load_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train_loss"]) for row in rows] == [(s, 1.0 if s <= 3 else 2.0) for s in range(1, 8)]
    assert load_summary(tmp_path)["steps"] == 7
    layers = load_rows(tmp_path / "layers.jsonl")
    assert [(row["step"], row["threshold"]) for row in layers] == [*((s, 1.0) for s in (1, 1, 2, 2, 3, 3)), (5, None)]
    assert [start["started_at"] for start in resumed.manifest["earlier_starts"]] == [first.manifest["started_at"]]


def test_rows_that_are_missing_before_a_restart_are_told(open_recorder, make_row, tmp_path: Path, caplog) -> None:
    with open_recorder(tmp_path) as recorder:
        recorder.step(make_row(1))
    with open_recorder(tmp_path, resume_step=3):
        assert "metrics.jsonl lacks 2 of the 3 steps before" in caplog.text


def test_the_null_recorder_has_the_same_interface(make_row) -> None:
    public = {name for name in vars(Recorder) if not name.startswith("_")}
    assert public <= {name for name in dir(NullRecorder) if not name.startswith("_")}
    with NullRecorder() as recorder:
        recorder.step(make_row(1))
        recorder.log("x")
        assert recorder.finish("done", {}) == {}
    with pytest.raises(RuntimeError), NullRecorder():
        raise RuntimeError


def test_a_file_in_the_way_of_the_folder(open_recorder, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for run_dir in (tmp_path / "run", tmp_path / "run" / "below"):
        for attempt in (open_recorder, lambda folder: setup_logging(folder, rank=0)):
            with pytest.raises(UserError, match=r"run.*cannot be written.*hydra\.run\.dir="):
                attempt(run_dir)


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json"])
def test_a_folder_in_the_way_of_a_file(open_recorder, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"hydra\.run\.dir="):
        open_recorder(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_disk_that_stays_full_fails_the_run_with_the_remedy(open_recorder, make_row, tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")  # every write to it fails with ENOSPC
    full = pytest.raises(UserError, match=r"No space left on device.*hydra\.run\.dir=")
    with full as caught, open_recorder(tmp_path) as recorder:
        recorder.step(make_row(1))
        recorder._metrics.close()
        recorder._metrics = MetricsFile(tmp_path / "full")
        recorder.step(make_row(2))
        recorder.finish("done")
    assert str(tmp_path) in str(caught.value)
    summary = load_summary(tmp_path)
    assert (summary["status"], summary["steps"]) == ("failed", 1)


def test_a_full_disk_does_not_hide_the_first_error(
    open_recorder, make_row, tmp_path: Path, monkeypatch, caplog
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise UserError(f"the run folder {path.parent} cannot be written")

    with pytest.raises(RuntimeError, match="first"), open_recorder(tmp_path) as recorder:
        recorder.step(make_row(1))
        monkeypatch.setattr("tagc.record.recorder.write_text_atomic", refuse)
        raise RuntimeError("first")
    assert "cannot be written" in caplog.text


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "summary.json"
    write_text_atomic(path, "old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("lost", [(4, 5), (9, 10)], ids=["in the middle", "at the end"])
def test_a_finished_run_that_lost_rows_counts_as_finished_and_says_so(config, make_row, tmp_path: Path, lost) -> None:
    manifest = build_manifest(config, kernels="reference", device="cpu")
    with Recorder(tmp_path, config, manifest) as recorder:
        for step in range(1, 11):
            recorder.step(make_row(step))
    rows = [row for row in load_rows(tmp_path / "metrics.jsonl") if row["step"] not in lost]
    rewrite_rows(tmp_path / "metrics.jsonl", rows)
    (tmp_path / "summary.json").unlink()
    with Recorder(tmp_path, config, manifest, resume_step=10) as recorder:  # from the last step's checkpoint
        summary = recorder.finish("done")
    assert (summary["steps"], summary["missing_rows"]) == (10, 2)
    assert "10 (6), the rows of 2 are missing" in [str(cell) for cell in final_table(summary).columns[1].cells]
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    prepare_start(tmp_path, config)  # sets the record aside instead of continuing its last step once more
    assert (tmp_path / "earlier" / "1" / "metrics.jsonl").exists()


def test_a_record_damaged_in_the_middle_leaves_a_failed_summary(config, make_row, tmp_path: Path) -> None:
    rows = "".join(json.dumps(make_row(step)) + "\n" for step in (1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text(rows.replace('{"step": 2', '{"ste'))
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2"):
        Recorder(tmp_path, config, build_manifest(config, kernels="reference", device="cpu"), resume_step=3)
    write_failed_summary(tmp_path, "failed", "metrics.jsonl, line 2: not JSON", config)
    summary = load_summary(tmp_path)
    assert (summary["status"], summary["error"]) == ("failed", "metrics.jsonl, line 2: not JSON")
    assert (summary["steps"], summary["missing_rows"], summary["train_loss"]) == (3, 1, make_row(3)["train_loss"])
