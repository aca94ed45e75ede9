"""run.py called in this process, with training left out."""

from __future__ import annotations

import json
import logging
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tagc.cli import entry as cli
from tagc.config import Config
from tagc.errors import UserError

RUN_PY = Path(__file__).parents[2] / "run.py"
Command = Callable[..., tuple[int, str, str]]


def _fake_launch(config: Config, run_dir: Path) -> dict[str, Any]:
    """Stands for the training: refuses the seed 13, breaks down for the seed 14 until its folder holds `mended`.

    With the seed 15 it gets SIGTERM when it is all but over.
    """
    if config.seed == 13:
        raise UserError("seed=13 is unlucky")
    if config.seed == 14 and not (run_dir / "mended").exists():
        with (run_dir / "tries").open("a") as tries:
            tries.write("x")
        raise RuntimeError("seed=14 broke down")
    logging.getLogger("tagc").info("said by the launcher")
    summary = {"status": "done", "compressor": config.compressor.name, "iteration_ms_median": 12.5}
    summary |= {"bandwidth": config.bandwidth.name, "seed": config.seed, "grad_wire_bytes_per_step": 2_500_000}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return summary | ({"stop_signal": signal.SIGTERM} if config.seed == 15 else {})


@pytest.fixture
def _root_logger() -> Iterator[None]:
    """Hydra sets up the root logger and leaves it so."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], _root_logger: None
) -> Command:
    """Call run.py in this process; returns exit code, stdout and stderr. Runs go to the temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(cli, "launch", _fake_launch)
    monkeypatch.setattr(cli.JobReport, "points", None)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(RUN_PY), run_name="__main__")
        return (int(stop.value.code or 0), *capsys.readouterr())

    return call
