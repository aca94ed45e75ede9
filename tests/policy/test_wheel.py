"""What pip installs works outside the checkout, conf/ included."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.policy.sources import ROOT


def test_a_wheel_composes_a_run_outside_the_checkout(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    ignore = shutil.ignore_patterns(".*", "outputs", "multirun", "report", "build", "experiments", "tests")
    shutil.copytree(ROOT, source, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    shutil.rmtree(source)
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "tagc.cli", "compressor=int8", "--cfg", "job"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "name: int8" in shown.stdout
    program = "import tagc, tagc.config as c; print(tagc.__file__, c.CONF_DIR)"
    places = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert places.stdout.split() == [str(site / "tagc" / "__init__.py"), str(site / "tagc" / "conf")]
    command = [sys.executable, "-m", "tagc.predict", "model=nano"]
    predicted = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "int8" in predicted.stdout, predicted.stderr
