"""Imports point one way: train -> comm -> compressors -> kernels -> codec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.policy.sources import MODULES, ROOT, imported_modules, imports_of, module_name, part_of

CHAIN = ["codec", "kernels", "compressors", "comm", "api", "train"]  # each may import those before it
SIDE = ["model", "data", "network", "record", "predict"]  # know nothing of train
GROUND = ["host", "config", "errors"]  # know nothing of the rest
GLUE = ["launch", "sweep", "cli"]  # between run.py and the parts; nobody below imports them
KNOWS_HYDRA = [
    "tagc.config.check",
    *(f"tagc.cli.{name}" for name in ("__main__", "entry", "help", "messages", "slurm_array", "sweeper")),
]


def forbidden_parts(part: str) -> set[str]:
    """The parts of tagc that ``part`` must not import."""
    if part in GLUE:
        return set()
    if part in GROUND:
        return set(CHAIN + SIDE + GLUE)
    above = CHAIN[CHAIN.index(part) + 1 :] if part in CHAIN else ["train"] if part in SIDE else []
    if part == "codec":
        return set(CHAIN[1:] + SIDE + GLUE + GROUND)
    return set(above + GLUE)


def violations(imports: set[str], part: str) -> set[str]:
    """Those of ``imports`` that ``part`` must not have."""
    forbidden = forbidden_parts(part)
    return {name for name in imports if name.split(".")[0] == "tagc" and part_of(name) in forbidden}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_module_imports_a_part_above_it(path: Path) -> None:
    assert violations(imports_of(path), part_of(module_name(path))) == set()


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(module_name(p)) == "codec"], ids=module_name)
def test_codec_imports_only_torch_and_the_standard_library(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert roots - set(sys.stdlib_module_names) - {"torch", "tagc"} == set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_nothing_below_the_command_line_knows_hydra(path: Path) -> None:
    if module_name(path) not in KNOWS_HYDRA:
        assert not {"omegaconf", "hydra"} & {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("path", sorted((ROOT / "analysis").rglob("*.py")), ids=module_name)
def test_analysis_reads_what_was_recorded_and_imports_nothing_that_runs(path: Path) -> None:
    imports = imports_of(path)
    assert not {name for name in imports if name.split(".")[0] == "experiments"}
    assert not {name for name in imports if name.startswith(("tagc.train", "tagc.launch", "tagc.comm"))}


@pytest.mark.parametrize("path", sorted((ROOT / "analysis").rglob("*.py")), ids=module_name)
def test_analysis_loads_no_command_line_even_through_others(path: Path) -> None:
    """Figures follow from rows: what composes today's conf/, or starts runs, is not there to be asked."""
    script = f"import sys, {module_name(path)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert f"{module_name(path)}" in loaded
    unwanted = ("hydra", "omegaconf", "submitit", "torch", "tagc.cli", "tagc.launch", "tagc.sweep", "tagc.train")
    assert [name for name in loaded if name.startswith(unwanted)] == []


def test_every_part_has_its_rule() -> None:
    parts = {part_of(module_name(path)) for path in MODULES}
    assert parts - {""} <= {*CHAIN, *SIDE, *GLUE, *GROUND}


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("codec", "from tagc.errors import UserError"),
        ("codec", "from ..kernels import pick"),
        ("kernels", "def late():\n    import tagc.compressors.tagc"),
        ("comm", "from tagc import train"),
        ("data", "from tagc.train.loop import step"),
        ("train", "from tagc.launch.launcher import launch"),
    ],
)
def test_the_rules_catch_a_wrong_import(part: str, source: str) -> None:
    assert violations(imported_modules(source, f"tagc.{part}.module"), part)
