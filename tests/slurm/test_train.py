"""Single runs on a real SLURM: one on two nodes, and requests that SLURM would not take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tagc.errors import UserError
from tagc.slurm import check_submission
from tests.slurm.daemons import Slurm, wait_until
from tests.slurm.runs import SETTINGS, STEPS, load_rows
from tests.train.harness import write_tokens

pytestmark = [pytest.mark.slurm, pytest.mark.end_to_end]


def test_two_launchers_train_one_run_through_a_preemption(slurm: Slurm, tmp_path: Path) -> None:
    """srun's two tasks stand for two nodes: each is a launcher with one rank."""
    write_tokens(tmp_path)
    run_dir, output = tmp_path / "run", tmp_path / "job.out"
    options = ["--parsable", "--time=5", "--ntasks=2", "--ntasks-per-node=2", f"--output={output}"]
    arguments = [*SETTINGS, f"data.path={tmp_path}", "cluster.nodes=2", f"hydra.run.dir={run_dir}"]
    job = slurm.submit(*options, "slurm/train.sbatch", *arguments)
    wait_until(lambda: len(load_rows(run_dir)) > 2, "rows")
    slurm.ask("scontrol", "requeue", job)  # as preemption does
    wait_until(lambda: not slurm.ask("squeue", "-h", "-j", job), "the end of the job", 90)
    described = slurm.describe_job(job)
    assert (described["JobState"], described["Restarts"]) == ("COMPLETED", "1"), output.read_text()
    assert [row["step"] for row in load_rows(run_dir)] == list(range(1, STEPS + 1))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["ranks"]) == ("done", 2)
    assert not list(run_dir.glob(".ranks_*")), "the launchers left something behind"


REFUSED = [
    ({"partition": "man"}, 1, "cluster.partition=man does not exist here; legal: main, closed; did you mean main?"),
    ({"partition": "closed"}, 1, "cluster.partition=closed is down"),
    ({"timeout_min": 60}, 1, "set cluster.time=30 or less"),
    ({"nodes": 2}, 1, "cluster.nodes=2, but cluster.partition=main has 1"),
    ({}, 10, "10 points to run, but an array of this cluster at most 9 tasks"),
    ({"constraint": "h100"}, 1, "see cluster.constraint"),
    ({"cpus_per_task": 64}, 1, "see cluster.gpus_per_node, cluster.cpus_per_task"),
    ({"gpus_per_node": 8}, 1, "see cluster.gpus_per_node, as `sinfo"),
]


def test_what_slurm_would_not_take_is_refused_before(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    check_submission({"timeout_min": 5, "nodes": 1}, 9)
    for params, tasks, message in REFUSED:
        with pytest.raises(UserError) as refusal:
            check_submission({"timeout_min": 5, "nodes": 1, **params}, tasks)
        assert message in str(refusal.value)
    assert slurm.ask("squeue", "-h") == ""
