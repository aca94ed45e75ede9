"""What would break a run, found before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.preflight import refuse_torchrun
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
