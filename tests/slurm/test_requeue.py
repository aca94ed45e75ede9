"""slurm/requeue.sh with a stand-in for SLURM's scontrol: which job goes back into the queue, and when it does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "requeue.sh"
JOBS = """JobId=7 ArrayJobId=7 ArrayTaskId=1 JobName=tagc JobState={state} Requeue=1 Restarts={restarts} BatchFlag=1
JobId=8 ArrayJobId=7 ArrayTaskId=0 JobName=tagc JobState=COMPLETED Requeue=1 Restarts=9 BatchFlag=1
JobId=9 JobName=tagc JobState=RUNNING Requeue=1 Restarts=0 BatchFlag=1"""


@pytest.mark.parametrize(
    ("job", "exit_code", "state", "restarts", "requeued", "end"),
    [
        ("7", 75, "RUNNING", 1, "7_1", 0),  # alone, its number would mean the whole array
        ("9", 75, "RUNNING", 1, "9", 0),
        ("7", 75, "RUNNING", 2, None, 75),
        ("7", 75, "PENDING", 1, None, 75),  # preemption was faster
        ("10", 75, "RUNNING", 1, None, 75),  # scontrol does not know it
        ("7", 1, "RUNNING", 1, None, 1),
        ("7", 0, "RUNNING", 1, None, 0),
    ],
)
def test_which_job_is_requeued(
    tmp_path: Path, job: str, exit_code: int, state: str, restarts: int, requeued: str | None, end: int
) -> None:
    (tmp_path / "jobs").write_text(JOBS.format(state=state, restarts=restarts))
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\n[ "$1" = show ] && exec cat {tmp_path}/jobs\necho "$2" > {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    inherited = {"SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "5", "SLURM_RESTART_COUNT": "9"}  # of an outer job
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**inherited, "PATH": path, "SLURM_JOB_ID": job, "TAGC_MAX_REQUEUES": "2"}
    done = subprocess.run([str(SCRIPT), str(exit_code)], env=environment, capture_output=True, text=True)
    assert done.returncode == end, done.stderr
    found = tmp_path / "requeued"
    assert (found.read_text().strip() if found.exists() else None) == requeued
    assert ("TAGC_MAX_REQUEUES" in done.stdout) == (restarts == 2)
    assert bool(done.stdout) == (exit_code == 75), "why a run that was saved is put back or not"
