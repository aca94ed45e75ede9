"""What would break a run, found before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.preflight import (
    check_compiler,
    check_gloo_interfaces,
    check_machine,
    check_nccl_interfaces,
    check_shared_memory,
    drop_thread_binding,
    refuse_torchrun,
)
from tagc.launch import Job, launch
from tagc.launch.agent import configure_agent
from tagc.launch.nodes import Nodes


def test_a_launcher_under_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"TORCHELASTIC_RUN_ID=none: .* python run.py cluster.ranks=2"):
        launch(Config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_variables_of_a_scheduler_alone_are_no_torchrun() -> None:
    refuse_torchrun({"RANK": "0", "WORLD_SIZE": "2"})
    refuse_torchrun({"TORCHELASTIC_RUN_ID": "left over"})


def test_the_rendezvous_needs_no_name_lookup(tmp_path: Path) -> None:
    agent = configure_agent(Job(Config(), tmp_path, None, Nodes(), report_dir=str(tmp_path)))
    assert (agent.rdzv_endpoint, agent.local_addr) == ("127.0.0.1:0", "127.0.0.1")
    assert "localhost" not in str(agent)


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do() -> None:
    check_gloo_interfaces({"GLOO_SOCKET_IFNAME": "lo,eth0"}, ["lo", "eth0"])
    check_gloo_interfaces({"GLOO_SOCKET_IFNAME": ""}, ["lo"])
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME=lo,ib7: .* interface ib7; it has lo, eth0"):
        check_gloo_interfaces({"GLOO_SOCKET_IFNAME": "lo,ib7"}, ["lo", "eth0"])


@pytest.mark.parametrize("value", ["eth", "=eth0", "ib,eth", "^lo", "^ib7", ""])
def test_what_nccl_accepts_is_accepted(value: str) -> None:
    check_nccl_interfaces({"NCCL_SOCKET_IFNAME": value}, ["lo", "eth0"])


@pytest.mark.parametrize("value", ["ib", "=eth", "=ib0,ib1"])
def test_what_nccl_would_not_find_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=f"NCCL_SOCKET_IFNAME={value}: .* it has lo, eth0"):
        check_nccl_interfaces({"NCCL_SOCKET_IFNAME": value}, ["lo", "eth0"])


def test_the_launcher_asks_before_data_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    config = Config()
    config.cluster.device = "cpu"
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME=nothing0"):
        launch(config, tmp_path / "run")
    config.network.name = "namespaces"  # whose interfaces we name
    check_machine(config, "cpu", os.environ)


def test_compiling_without_a_compiler_is_refused(tmp_path: Path) -> None:
    config = Config()
    config.trainer.compile = True
    with pytest.raises(UserError, match=r"trainer.compile=true .* no g\+\+"):
        check_machine(config, "cpu", {"PATH": str(tmp_path)})
    check_machine(config, "cuda", {"PATH": str(tmp_path)})
    compiler = tmp_path / "my-cxx"
    compiler.touch(mode=0o755)
    check_compiler({"PATH": str(tmp_path), "CXX": "my-cxx -O1"})


def test_shared_memory_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_shared_memory(tmp_path)
    with pytest.raises(UserError, match=r"nowhere cannot be used \(No such file"):
        check_shared_memory(tmp_path / "nowhere")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: _Usage(65536))
    with pytest.raises(UserError, match=r"only 65,536 bytes are free.*--shm-size"):
        check_shared_memory(tmp_path)


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_threads_bound_to_cores_do_not_bind_the_ranks() -> None:
    assert drop_thread_binding({"OMP_NUM_THREADS": "2"}) is None
    program = (
        "import os; from tagc.host.preflight import drop_thread_binding\n"
        "before = os.sched_getaffinity(0); print(drop_thread_binding(os.environ)); import torch\n"
        "assert os.sched_getaffinity(0) == before and 'OMP_PROC_BIND' not in os.environ"
    )
    environment = os.environ | {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ignored: OMP_PROC_BIND=true, OMP_PLACES=cores")
