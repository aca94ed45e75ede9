"""Several machines and SLURM, where neither is needed: what is refused, and why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tagc.cli import slurm_array
from tagc.cli.slurm import check_submission, hide_other_settings
from tagc.cli.slurm_array import check_same_request, wait_for_array
from tagc.config import Config, validate
from tagc.errors import UserError
from tagc.launch import launch
from tagc.launch.nodes import meet_nodes


@pytest.mark.parametrize(
    ("cluster", "network", "message"),
    [
        ({"ranks": 3, "nodes": 2}, "paced", "cluster.ranks=3 .* cluster.nodes=2; try cluster.ranks=2 or 4"),
        ({"ranks": 1, "nodes": 2}, "paced", "try cluster.ranks=2$"),
        ({"nodes": 2, "gpus_per_node": 4}, "paced", "are 8 GPUs for cluster.ranks=2; .* set cluster.ranks=8"),
        ({"nodes": 2}, "namespaces", "cannot have cluster.nodes=2; set network=paced"),
    ],
)
def test_nodes_that_do_not_fit(cluster: dict[str, int], network: str, message: str) -> None:
    config = Config()
    config.network.name = network
    for key, value in cluster.items():
        setattr(config.cluster, key, value)
    with pytest.raises(UserError, match=message):
        validate(config)


def test_several_nodes_need_srun() -> None:
    config = Config()
    config.cluster.nodes = 2
    for environment in ({}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}):
        with pytest.raises(UserError, match="one launcher on each node"), meet_nodes(config.cluster, environment):
            pass


def test_slurm_is_for_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = Config()
    config.cluster.name = "slurm"
    with pytest.raises(UserError, match=r"run.py -m cluster=slurm"):
        launch(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no sbatch in PATH"):
        check_submission({"timeout_min": 5, "nodes": 1}, 2)


def test_tasks_of_an_array_ask_for_the_same() -> None:
    check_same_request([["cluster.ranks=2", "seed=0"], ["cluster.ranks=4", "seed=0"]])
    with pytest.raises(UserError, match=r"cluster.nodes=1,2: .* one sweep for each value"):
        check_same_request([["cluster.nodes=1", "seed=0"], ["cluster.nodes=2", "seed=0"]])


def test_settings_of_another_job_stay_out_of_a_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CONF", "SBATCH_PARTITION", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    with hide_other_settings({"partition": "gpu", "account": None}):
        left = {name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))}
    assert left == {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert dict(os.environ) == before


@pytest.mark.parametrize("fail_fast", [True, False])
def test_fail_fast_cancels_what_waits(fail_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"7_0": "FAILED", "7_1": "RUNNING", "7_2": "PENDING (Resources)"}
    cancelled = []

    def let_time_pass(_: float) -> None:
        states["7_1"] = "COMPLETED"
        states["7_2"] = "CANCELLED" if cancelled else "COMPLETED"

    monkeypatch.setattr(slurm_array, "read_states", lambda array_id: dict(states))
    monkeypatch.setattr(slurm_array, "cancel_waiting", cancelled.append)
    monkeypatch.setattr(slurm_array.time, "sleep", let_time_pass)
    last = "CANCELLED" if fail_fast else "COMPLETED"
    assert wait_for_array("7", fail_fast) == {"7_0": "FAILED", "7_1": "COMPLETED", "7_2": last}
    assert cancelled == ["7"] * fail_fast
