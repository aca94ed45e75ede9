"""Small files, no stray prints, examples that run."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.policy.sources import MODULES, ROOT, module_name

MAX_LINES = 400
RUN_PY_LINES = 60
SUFFIXES = (".py", ".yaml", ".sbatch", ".sh")
FOLDERS = ("tagc", "tests", "conf", "experiments", "analysis", "slurm")


def _prints(source: str) -> list[int]:
    """Lines on which ``print`` is called."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_stray_prints(path: Path) -> None:
    assert _prints(path.read_text()) == []


def test_a_stray_print_is_found() -> None:
    assert _prints("def f():\n    # print(0)\n    print('x')") == [3]


def test_files_are_small() -> None:
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count >= MAX_LINES} == {}
    assert len((ROOT / "run.py").read_text().splitlines()) < RUN_PY_LINES


def test_every_example_runs() -> None:
    """Pytest looks for examples in ``testpaths`` only."""
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    places = [ROOT / path for path in paths]
    with_examples = [path for path in MODULES if "    >>> " in path.read_text()]
    assert [path for path in with_examples if not {path, *path.parents} & {*places}] == []
