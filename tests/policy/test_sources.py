"""Small files, no stray prints, every key explained where it is defined."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.policy.sources import MODULES, PACKAGE, ROOT, module_name

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


def undocumented_keys(source: str) -> list[str]:
    """Annotated class attributes without a comment on their line, or on lines of their own just above.

    ``name`` is the name of the group's option, and a section is explained by its class.
    """
    lines = source.splitlines()
    found = []
    for section in ast.parse(source).body:
        keys = section.body if isinstance(section, ast.ClassDef) and section.name.endswith("Config") else []
        for key in keys:
            if not isinstance(key, ast.AnnAssign) or not isinstance(key.target, ast.Name):
                continue
            is_section = isinstance(key.annotation, ast.Name) and key.annotation.id.endswith("Config")
            commented = "#" in lines[key.end_lineno - 1] or lines[key.lineno - 2].strip().startswith("#")
            if not (commented or is_section or key.target.id == "name"):
                found.append(f"{section.name}.{key.target.id}")
    return found


def test_every_key_is_explained() -> None:
    assert undocumented_keys((PACKAGE / "config.py").read_text()) == []


def test_an_unexplained_key_is_found() -> None:
    source = "class XConfig:\n    name: str = ''\n    a: int = 1  # one\n    b: int = 2\n"
    assert undocumented_keys(source) == ["XConfig.b"]
