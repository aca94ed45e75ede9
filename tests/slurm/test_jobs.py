"""A real SLURM: a sweep both ways, `run.py -m cluster=slurm` and `sbatch --array slurm/sweep.sbatch`, and one run of
two launchers, all at once, as most of the time goes into waiting.

In each array one task is stopped half-way and comes back, one fails and one is cancelled; in the first one more runs
undisturbed. It and the two that came back train the same, so they tell whether a requeue changes a single bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tagc.cli.slurm_array import check_nothing_queued
from tagc.errors import UserError
from tests.slurm.daemons import Slurm, wait_until
from tests.slurm.runs import ROOT, SETTINGS, STEPS, find_point, load_rows
from tests.train.harness import write_tokens

pytestmark = [pytest.mark.slurm, pytest.mark.end_to_end, pytest.mark.timeout(1800)]
UNDISTURBED, STOPPED, FAILS, CANCELLED = range(4)
TOKENS = ["tokens0", "tokens1", "missing", "tokens3"]
LIMIT_S = 600  # of one wait
ENDS = {STOPPED: ("COMPLETED", "1"), FAILS: ("FAILED", "0"), CANCELLED: ("CANCELLED", "0")}


def name_points(folder: Path) -> list[str]:
    """The overrides of four points, and their tokens; those of the third are missing."""
    for name in TOKENS:
        if name != "missing":
            (folder / name).mkdir()
            write_tokens(folder / name)
    return [*SETTINGS, "data.path=" + ",".join(str(folder / name) for name in TOKENS)]


def wait_for_rows(sweep_dir: Path, point: int) -> None:
    wait_until(lambda: len(load_rows(find_point(sweep_dir, TOKENS[point]))) > 1, f"rows of point {point}", LIMIT_S)


def sweep_through_submitit(slurm: Slurm, sweep_dir: Path, points: list[str]) -> str:
    """Returns the number of the array."""
    command = [
        sys.executable,
        "run.py",
        "-m",
        "cluster=slurm",
        "cluster.time=5",
        "cluster.array_parallelism=3",
        *points,
    ]
    said = sweep_dir.with_suffix(".txt")
    with said.open("w") as file:
        command.append(f"hydra.sweep.dir={sweep_dir}")
        run = subprocess.Popen(command, cwd=ROOT, env=slurm.environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: list(sweep_dir.glob(".submitit/*_0")) or run.poll() is not None, "an array", LIMIT_S)
        assert run.poll() is None, said.read_text()
        array = next(sweep_dir.glob(".submitit/*_0")).name.removesuffix("_0")
        slurm.ask("scancel", f"{array}_{CANCELLED}")  # it waits for one of the three before it
        with pytest.raises(UserError, match=f"SLURM array {array} of the sweep in {sweep_dir} is still in the queue"):
            check_nothing_queued(sweep_dir / ".submitit")  # as when run.py has gone and is called again
        wait_for_rows(sweep_dir, STOPPED)
        slurm.ask("scancel", "--signal=USR1", f"{array}_{STOPPED}")  # as SLURM does before the time is up
        wait_until(lambda: run.poll() is not None, "the end of run.py", LIMIT_S)
    finally:
        run.kill()
    assert run.returncode == 1, said.read_text()
    return array


def sweep_through_sbatch(slurm: Slurm, sweep_dir: Path, points: list[str]) -> str:
    """Returns the number of the array, which has all points but the first."""
    options = ["--parsable", "--time=5", f"--array={STOPPED}-{CANCELLED}", f"--output={sweep_dir}_%a.txt"]
    array = slurm.submit(*options, "slurm/sweep.sbatch", *points, f"hydra.sweep.dir={sweep_dir}")
    wait_for_rows(sweep_dir, STOPPED)
    slurm.ask("scontrol", "requeue", f"{array}_{STOPPED}")  # as preemption does
    wait_for_rows(sweep_dir, CANCELLED)
    slurm.ask("scancel", f"{array}_{CANCELLED}")
    wait_until(lambda: not slurm.ask("squeue", "-h", "-j", array), "the end of the array", LIMIT_S)
    return array


def train_on_two_launchers(slurm: Slurm, folder: Path) -> None:
    """srun's two tasks stand for two nodes: each is a launcher with one rank. The run is preempted once."""
    run_dir, output = folder / "run", folder / "job.txt"
    options = ["--parsable", "--time=5", "--ntasks=2", "--ntasks-per-node=2", f"--output={output}"]
    arguments = [*SETTINGS, f"data.path={folder / TOKENS[0]}", "cluster.nodes=2", f"hydra.run.dir={run_dir}"]
    job = slurm.submit(*options, "slurm/train.sbatch", *arguments)
    wait_until(lambda: len(load_rows(run_dir)) > 1, "rows of the run", LIMIT_S)
    slurm.ask("scontrol", "requeue", job)  # as preemption does
    wait_until(lambda: not slurm.ask("squeue", "-h", "-j", job), "the end of the job", LIMIT_S)
    described = slurm.describe_job(job)
    assert (described["JobState"], described["Restarts"]) == ("COMPLETED", "1"), output.read_text()
    assert [row["step"] for row in load_rows(run_dir)] == list(range(1, STEPS + 1))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["ranks"]) == ("done", 2)
    assert not list(run_dir.glob(".ranks_*")), "the launchers left something behind"


def check_ends(slurm: Slurm, array: str, ends: dict[int, tuple[str, str]]) -> None:
    """What SLURM says of the tasks: how they ended after how many restarts, and how long they took."""
    jobs = {index: slurm.describe_job(f"{array}_{index}") for index in ends}
    # Unknown: it never started.
    assert {i: (job.get("JobState", "CANCELLED"), job.get("Restarts", "0")) for i, job in jobs.items()} == ends
    hours, minutes, seconds = map(int, jobs[STOPPED]["RunTime"].split(":"))
    assert 0 < hours * 3600 + minutes * 60 + seconds < 300


def load_losses(sweep_dir: Path, point: int) -> list[tuple[int, float]]:
    return [(row["step"], row["train_loss"]) for row in load_rows(find_point(sweep_dir, TOKENS[point]))]


def test_a_sweep_both_ways_and_a_run_on_two_nodes(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    points = name_points(tmp_path)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(sweep_through_submitit, slurm, tmp_path / "submitit", points)
        second = pool.submit(sweep_through_sbatch, slurm, tmp_path / "sbatch", points)
        run = pool.submit(train_on_two_launchers, slurm, tmp_path)
    run.result()
    check_ends(slurm, first.result(), {UNDISTURBED: ("COMPLETED", "0"), **ENDS})
    check_ends(slurm, second.result(), ENDS)
    losses = load_losses(tmp_path / "submitit", UNDISTURBED)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    for way in ("submitit", "sbatch"):
        assert load_losses(tmp_path / way, STOPPED) == losses, f"a requeue has changed the run through {way}"
    cancelled = find_point(tmp_path / "sbatch", TOKENS[CANCELLED])
    assert cancelled is not None
    assert list(cancelled.glob("checkpoints/step_*")), "scancel has not let the run save"
