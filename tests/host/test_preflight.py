"""What would break a run, found before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.preflight import refuse_torchrun
from tagc.launch import launch


def test_a_launcher_under_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"TORCHELASTIC_RUN_ID=none: .* python run.py cluster.ranks=2"):
        launch(Config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_variables_of_a_scheduler_alone_are_no_torchrun() -> None:
    refuse_torchrun({"RANK": "0", "WORLD_SIZE": "2"})
    refuse_torchrun({"TORCHELASTIC_RUN_ID": "left over"})
