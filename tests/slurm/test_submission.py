"""Requests that a real SLURM would not take: each is refused before anything is submitted."""

from __future__ import annotations

import pytest

from tagc.cli.slurm import check_submission
from tagc.errors import UserError
from tests.slurm.daemons import Slurm

pytestmark = pytest.mark.slurm
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
