"""A point in a process of its own, as srun starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_second_task_of_a_one_node_job_is_no_other_node(tmp_path: Path) -> None:
    """It ended with 0 and left no record when its data was missing."""
    slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    command = [sys.executable, "run.py", "-m", "data=bin", f"data.path={tmp_path}/absent", "data.vocab_size=256"]
    command += ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "sweep.only=0"]
    done = subprocess.run(
        [*command, f"hydra.sweep.dir={tmp_path}/sweep"],
        cwd=ROOT,
        env=os.environ | slurm,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "absent" in done.stderr, done.stderr
    (record,) = (tmp_path / "sweep").glob("*/job.json")
    assert json.loads(record.read_text())["is_bad_input"] is True
    assert "absent" in (record.parent / "error.txt").read_text()
    assert json.loads((record.parent / "summary.json").read_text())["status"] == "failed"
