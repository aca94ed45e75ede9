"""A sweep as a user meets it: what is refused before it starts, and what a second command does. No training."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from tagc.cli import sweeper
from tagc.config import Config
from tagc.sweep import jobs
from tagc.sweep.identity import hash_config, name_folder
from tagc.sweep.states import State, read_state
from tests.cli.conftest import Command

SWEEP = ("-m", "hydra.sweep.dir=sweep")


def point_dir(tmp_path: Path, seed: int) -> Path:
    """The folder of the default configuration with this seed."""
    return tmp_path / "sweep" / name_folder(Config(seed=seed))


def test_keys_that_decide_a_number_make_another_run_and_no_others_do() -> None:
    config, other = Config(), Config()
    other.logging.console_every, other.sweep.only, other.experiment = 1, 3, "x"
    other.trainer.checkpoint_every, other.cluster.timeout_s = 1, 5.0
    other.network.latency_ms = 0  # an integer where the schema has a float
    assert hash_config(config) == hash_config(other)
    other.cluster.ranks = 4
    assert hash_config(config) != hash_config(other)


def test_a_folders_name_is_one_name_whatever_the_model_is_called() -> None:
    config = Config()
    config.model.name = "../" + "x" * 300
    assert name_folder(config) == f"tagc2-unlimited-.._{'x' * 37}-seed0-{hash_config(config)}"


def test_the_second_command_skips_retries_and_adds(command: Command, tmp_path: Path) -> None:
    code, _, err = command(*SWEEP, "seed=1,14,2")
    assert code == 1 and "1 of 3 points are not done" in err
    folder = point_dir(tmp_path, 14)
    assert "RuntimeError: seed=14 broke down" in (folder / "error.txt").read_text()
    assert (folder / "tries").read_text() == "xx", "sweep.retries=1"
    assert read_state(folder) is State.FAILED and read_state(point_dir(tmp_path, 1)) is State.DONE
    before = (point_dir(tmp_path, 1) / "summary.json").stat().st_mtime_ns
    (folder / "mended").touch()
    code, out, err = command(*SWEEP, "seed=3,2,14,1")
    assert (code, err) == (0, "")
    assert "4 point(s), 1 pending, 2 done, 1 failed" in out
    assert "point 1 skipped, done: seed=2" in out and "point 2 tried again: seed=14" in out
    assert (point_dir(tmp_path, 1) / "summary.json").stat().st_mtime_ns == before
    assert not (folder / "error.txt").exists() and read_state(point_dir(tmp_path, 3)) is State.DONE


def test_bad_input_is_not_tried_again_and_fail_fast_ends_the_sweep(command: Command, tmp_path: Path) -> None:
    code, out, err = command(*SWEEP, "seed=13,14,1", "sweep.fail_fast=true")
    assert code == 1 and "3 of 3 points are not done" in err and "trying" not in out
    code, out, err = command(*SWEEP, "seed=13,1")
    assert code == 1 and "trying" not in out and err.count("seed=13 is unlucky") == 1
    assert read_state(point_dir(tmp_path, 14)) is State.PENDING


def test_a_signal_in_a_points_last_moment_ends_the_sweep(command: Command, tmp_path: Path) -> None:
    code, _, err = command(*SWEEP, "seed=15,1")
    assert code == 128 + 15 and "interrupted by SIGTERM" in err
    assert [read_state(point_dir(tmp_path, seed)) for seed in (15, 1)] == [State.DONE, State.PENDING]
    for whole in (("seed=15",), ("-m", "hydra.sweep.dir=other", "seed=1,15"), (*SWEEP, "seed=15,2", "sweep.only=0")):
        assert command(*whole)[0] == 0, "all that was asked for is done"


def test_without_a_folder_the_same_command_goes_on(command: Command, tmp_path: Path) -> None:
    for _ in range(2):
        code, out, _ = command("-m", "seed=1,2")
        assert code == 0
    assert "2 point(s), 2 done" in out and (tmp_path / "multirun" / "default" / "multirun.yaml").exists()


def test_only_one_point_in_the_folder_of_the_whole(command: Command, tmp_path: Path) -> None:
    code, _, err = command(*SWEEP, "seed=1,2", "sweep.only=1")
    assert (code, err) == (0, "")
    assert [read_state(point_dir(tmp_path, seed)) for seed in (1, 2)] == [State.PENDING, State.DONE]
    assert "sweep.only=2: the sweep has 2 points, 0 to 1" in command(*SWEEP, "seed=1,2", "sweep.only=2")[2]
    assert "add -m" in command("sweep.only=1")[2]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["seed=1,-1,-2"], ["2 of 3 points", "point 1 (seed=-1): seed=-1 is", "point 2 (seed=-2): seed=-2 is"]),
        (["cluster.device=cpu,cuda"], ["1 of 2 points", "cluster.device=cuda, but"]),
        (["logging.wandb=offline,disabled"], ["points 0 (", "and 1 (", "are the same run"]),
        (["seed=1", "hydra.sweep.subdir=x"], ["hydra.sweep.subdir", "hydra.sweep.dir"]),
        (["seed=1", "sweep.retries=-1"], ["sweep.retries=-1", ">= 0"]),
        (["experiment=laptop,ablation"], ["experiment: each brings a grid", "one command for each"]),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(command: Command, tmp_path: Path, arguments, parts) -> None:
    code, _, err = command(*SWEEP, *arguments)
    assert code == 1 and [part for part in parts if part not in err] == [], err
    assert not (tmp_path / "sweep").exists()


def test_other_code_is_mixed_only_knowingly(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_code(source: str) -> None:
        code = {"git_commit": source * 10, "git_dirty": source == "b", "source": source}
        for module in (jobs, sweeper):
            monkeypatch.setattr(module, "describe_code", lambda: code)

    set_code("a")
    assert command(*SWEEP, "seed=1")[0] == 0
    set_code("b")
    code, _, err = command(*SWEEP, "seed=1,2")
    assert code == 1 and "1 point(s) with aaaaaaaaaa (source a); now bbbbbbbbbb with uncommitted changes" in err
    assert "sweep.mixed_code=true" in err
    assert command(*SWEEP, "seed=1")[0] == 0, "nothing is left to run"
    assert command(*SWEEP, "seed=1,2", "sweep.mixed_code=true")[0] == 0


def test_a_folder_that_is_something_else_or_in_use(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.write_text("in the way")
    code, _, err = command(*SWEEP, "seed=1")
    assert code == 1 and "sweep, cannot be written (File exists)" in err and "hydra.sweep.dir" in err
    folder.unlink()
    folder.mkdir()
    (folder / "thesis.tex").touch()
    assert "is not the folder of a sweep: it holds thesis.tex" in command(*SWEEP, "seed=1")[2]
    (folder / "thesis.tex").unlink()
    (folder / "multirun.yaml").touch()
    point_dir(tmp_path, 1).touch()
    assert "is in the way of the folder of point 0" in command(*SWEEP, "seed=1")[2]
    point_dir(tmp_path, 1).unlink()
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert "another sweep is running in" in command(*SWEEP, "seed=1")[2]
    assert command(*SWEEP, "seed=1", "sweep.only=0")[0] == 0, "tasks of an array share the folder"
    os.close(handle)


def test_a_point_that_runs_elsewhere_stops_the_sweep(command: Command, tmp_path: Path) -> None:
    folder = point_dir(tmp_path, 1)
    folder.mkdir(parents=True)
    (folder.parent / "multirun.yaml").touch()
    (folder / "job.json").write_text(json.dumps({"pid": 1}))
    assert read_state(folder) is State.INTERRUPTED, "killed"
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    os.write(handle, json.dumps({"host": "here", "pid": 7}).encode())
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert read_state(folder) is State.RUNNING
    code, _, err = command(*SWEEP, "seed=1,2")
    assert code == 1 and "is being run by process 7 on here" in err
    assert not point_dir(tmp_path, 2).exists()
    os.close(handle)
    assert command(*SWEEP, "seed=1,2")[0] == 0 and read_state(folder) is State.DONE


@pytest.mark.parametrize(("experiment", "count"), [("laptop", 5), ("ablation", 16), ("paper_tagc", 15)])
def test_the_grid_of_an_experiment_is_in_its_file(command: Command, experiment: str, count: int) -> None:
    _, _, err = command(*SWEEP, f"experiment={experiment}", f"sweep.only={count}")
    assert f"sweep.only={count}: the sweep has {count} points" in err


def test_a_single_run_leaves_a_folder_in_use_alone(command: Command, tmp_path: Path) -> None:
    """Hydra writes .hydra/ before a job begins."""
    folder = tmp_path / "run"
    folder.mkdir()
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    code, _, err = command("seed=1", f"hydra.run.dir={folder}")
    assert code == 1 and "in use by another run" in err
    assert os.listdir(folder) == [".lock"]
    os.close(handle)
    assert command("seed=1", f"hydra.run.dir={folder}")[0] == 0


def test_a_method_runs_once_whatever_the_keys_it_does_not_use(command: Command, tmp_path: Path) -> None:
    code, out, err = command(*SWEEP, "compressor=fsdp,tagc2", "compressor.sparsity=0.8,0.9")
    assert (code, err) == (0, "")
    assert "1 of 4 points left out: they differ from others only in keys that their method does not use" in out
    names = sorted(path.parent.name.split("-")[0] for path in tmp_path.glob("*/*/summary.json"))
    assert names == ["fsdp", "tagc2", "tagc2"]
    command(*SWEEP, "compressor=fsdp")
    assert len(list(tmp_path.glob("*/fsdp-*"))) == 1, "the same point as in the sweep before"


def test_a_key_that_no_point_uses_is_refused(command: Command) -> None:
    code, _, err = command(*SWEEP, "compressor=fsdp,int8", "compressor.ratio=2")
    assert code == 1
    assert "point 1 (compressor=int8 compressor.ratio=2): " in err and "does not use compressor.ratio" in err


def test_keys_that_the_method_does_not_use_do_not_tell_points_apart() -> None:
    a, b = Config(), Config()
    a.compressor.name = b.compressor.name = "int8"
    b.compressor.sparsity = 0.9
    assert name_folder(a) == name_folder(b)
    b.compressor.block = 64
    assert name_folder(a) != name_folder(b)
