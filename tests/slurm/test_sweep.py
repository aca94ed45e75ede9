"""A sweep on a real SLURM, both ways: `run.py -m cluster=slurm` and `sbatch --array slurm/sweep.sbatch`.

Of each array's tasks one runs undisturbed, one is stopped half-way and comes back, one fails and one is cancelled. The
first two train the same, so they tell whether a requeue changes a single bit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tagc.array_launcher import check_nothing_queued
from tagc.errors import UserError
from tests.slurm.daemons import Slurm, wait_until
from tests.slurm.runs import ROOT, SETTINGS, STEPS, find_point, load_rows
from tests.train.harness import write_tokens

pytestmark = [pytest.mark.slurm, pytest.mark.end_to_end]
UNDISTURBED, STOPPED, FAILS, CANCELLED = range(4)
TOKENS = ["tokens0", "tokens1", "missing", "tokens3"]


@pytest.fixture
def sweep(tmp_path: Path) -> list[str]:
    """The overrides of four points."""
    for name in TOKENS:
        if name != "missing":
            (tmp_path / name).mkdir()
            write_tokens(tmp_path / name)
    points = ",".join(str(tmp_path / name) for name in TOKENS)
    return [*SETTINGS, f"data.path={points}", f"hydra.sweep.dir={tmp_path}/sweep"]


def check_tasks(slurm: Slurm, array: str, sweep_dir: Path) -> None:
    """What SLURM says of the four tasks, and what they recorded."""
    jobs = [slurm.describe_job(f"{array}_{index}") for index in range(4)]
    ends = [(job.get("JobState", "CANCELLED"), job.get("Restarts", "0")) for job in jobs]  # unknown: it never started
    assert ends == [("COMPLETED", "0"), ("COMPLETED", "1"), ("FAILED", "0"), ("CANCELLED", "0")]
    hours, minutes, seconds = map(int, jobs[UNDISTURBED]["RunTime"].split(":"))
    assert 0 < hours * 3600 + minutes * 60 + seconds < 300
    both = [load_rows(find_point(sweep_dir, TOKENS[index])) for index in (UNDISTURBED, STOPPED)]
    losses = [[(row["step"], row["train_loss"]) for row in rows] for rows in both]
    assert [step for step, _ in losses[0]] == list(range(1, STEPS + 1))
    assert losses[0] == losses[1], "a requeue has changed the run"


def test_through_submitit(slurm: Slurm, tmp_path: Path, sweep: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    sweep_dir, said = tmp_path / "sweep", tmp_path / "said"
    command = [sys.executable, "run.py", "-m", "cluster=slurm", "cluster.time=5", "cluster.array_parallelism=3", *sweep]
    with said.open("w") as file:
        run = subprocess.Popen(command, cwd=ROOT, env=slurm.environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: list(sweep_dir.glob(".submitit/*_0")) or run.poll() is not None, "an array")
        assert run.poll() is None, said.read_text()
        array = next(sweep_dir.glob(".submitit/*_0")).name.removesuffix("_0")
        slurm.ask("scancel", f"{array}_{CANCELLED}")  # it waits for one of the three before it
        with pytest.raises(UserError, match=f"SLURM array {array} of the sweep in {sweep_dir} is still in the queue"):
            check_nothing_queued(sweep_dir / ".submitit")  # as when run.py has gone and is called again
        wait_until(
            lambda: len(load_rows(find_point(sweep_dir, TOKENS[STOPPED]))) > 3, "rows of the point to be stopped"
        )
        slurm.ask("scancel", "--signal=USR1", f"{array}_{STOPPED}")  # as SLURM does before the time is up
        wait_until(lambda: run.poll() is not None, "the end of run.py", 120)
    finally:
        run.kill()
    assert run.returncode == 1, said.read_text()
    check_tasks(slurm, array, sweep_dir)


def test_through_sbatch(slurm: Slurm, tmp_path: Path, sweep: list[str]) -> None:
    sweep_dir = tmp_path / "sweep"
    options = ["--parsable", "--time=5", "--array=0-3%3", f"--output={tmp_path}/%a.out"]
    array = slurm.submit(*options, "slurm/sweep.sbatch", *sweep)
    wait_until(lambda: len(load_rows(find_point(sweep_dir, TOKENS[STOPPED]))) > 3, "rows of the point to be stopped")
    slurm.ask("scontrol", "requeue", f"{array}_{STOPPED}")  # as preemption does
    wait_until(lambda: load_rows(find_point(sweep_dir, TOKENS[CANCELLED])), "rows of the point to be cancelled", 120)
    slurm.ask("scancel", f"{array}_{CANCELLED}")
    wait_until(lambda: not slurm.ask("squeue", "-h", "-j", array), "the end of the array", 120)
    check_tasks(slurm, array, sweep_dir)
