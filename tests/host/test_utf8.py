"""Commands under a locale that cannot write what people call their folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("model.layers=1", "model.width=48", "model.heads=3", "model.context=16", "compressor.min_numel=512")
ASCII = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.end_to_end
@pytest.mark.parametrize("variables, shown", [({}, "läuf"), ({"PYTHONIOENCODING": "ascii"}, "l\\xe4uf")])
def test_a_run_in_a_folder_with_other_letters(tmp_path: Path, variables: dict[str, str], shown: str) -> None:
    run_dir = tmp_path / "läuf"
    command = [sys.executable, "run.py", *SMALL, "trainer.max_steps=1", f"hydra.run.dir='{run_dir}'"]
    run = subprocess.run(command, cwd=ROOT, env=ASCII | variables, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    assert shown in run.stdout.decode("utf-8")
    assert json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["status"] == "done"


def test_utf8_mode_that_is_refused_is_not_tried_for_ever() -> None:
    program = "from tagc.host.utf8 import ensure_utf8; ensure_utf8(); import sys; print(sys.getfilesystemencoding())"
    for options, encoding in (([], "utf-8"), (["-X", "utf8=0"], "ascii")):
        command = [sys.executable, *options, "-c", program]
        shown = subprocess.run(command, cwd=ROOT, env=ASCII, capture_output=True, text=True, check=True, timeout=300)
        assert shown.stdout == f"{encoding}\n"
