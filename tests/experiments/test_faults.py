"""Faults that could hurt the machine itself are refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.faults.kinds import KINDS


@pytest.mark.parametrize(("kind", "why"), [("link", "needs network=namespaces"), ("full", "needs one of its own")])
def test_the_machine_s_own_network_and_disk_are_left_alone(kind: str, why: str, tmp_path: Path) -> None:
    output = tmp_path / "run.txt"
    output.write_text("")
    run = SimpleNamespace(find_ranks=lambda: [os.getpid()], output=output, run_dir=tmp_path / "run")
    with pytest.raises(RuntimeError, match=why):
        KINDS[kind](run)
    assert [path.name for path in tmp_path.iterdir()] == ["run.txt"]
