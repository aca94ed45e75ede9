"""Commands under a locale that cannot write what people call their folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.harness import VOCAB
from tests.train.harness import write_tokens

ROOT = Path(__file__).parents[2]
TINY = (
    *("model.layers=1", "model.width=48", "model.heads=3", "model.context=16", "compressor.min_numel=512"),
    *("data=bin", f"data.vocab_size={VOCAB}", "kernels=reference", "trainer.max_steps=1"),
)
ASCII = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.end_to_end
def test_a_run_in_a_folder_with_other_letters(tmp_path: Path) -> None:
    """Neither the locale nor the output that the user asked for can write them."""
    run_dir = tmp_path / "läuf"
    run_dir.mkdir()
    write_tokens(run_dir)
    command = [sys.executable, "run.py", *TINY, f"data.path='{run_dir}'", f"hydra.run.dir='{run_dir}/run'"]
    run = subprocess.run(command, cwd=ROOT, env=ASCII | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr.decode()
    assert "l\\xe4uf" in run.stdout.decode("ascii")
    assert json.loads((run_dir / "run" / "summary.json").read_text(encoding="utf-8"))["status"] == "done"


def test_utf8_mode_that_is_refused_is_not_tried_for_ever() -> None:
    program = "from tagc.host.utf8 import ensure_utf8; ensure_utf8(); import sys; print(sys.getfilesystemencoding())"
    for options, encoding in (([], "utf-8"), (["-X", "utf8=0"], "ascii")):
        command = [sys.executable, *options, "-c", program]
        shown = subprocess.run(command, cwd=ROOT, env=ASCII, capture_output=True, text=True, check=True, timeout=300)
        assert shown.stdout == f"{encoding}\n"
