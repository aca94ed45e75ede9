"""The READMEs' commands exist: make targets and modules are there, every run.py command composes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from tagc.compressors import COMPRESSORS, BucketSpec
from tagc.kernels import resolve_backend
from tests.policy.compose import compose_config
from tests.policy.sources import ROOT

README = ROOT / "README.md"
PAGES = sorted(
    page for pattern in ("*.md", "docs/*.md", "experiments/**/*.md", "slurm/*.md") for page in ROOT.glob(pattern)
)


def find_commands(markdown: str) -> list[list[str]]:
    """The ``make`` and ``python run.py`` commands in fenced blocks, split as a shell would."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    lines = chain.from_iterable(block.replace("\\\n", " ").splitlines() for block in blocks)
    words = (shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines)
    return [w for w in words if w[:1] == ["make"] or w[:2] == ["python", "run.py"]]


def compose_command(arguments: list[str]) -> int:
    """Compose every job of ``python run.py ARGUMENTS``; returns how many there are."""
    overrides = [word for word in arguments if not word.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(overrides)
    jobs = list(chain.from_iterable(BasicSweeper.split_arguments(parsed, None)))
    assert len(jobs) == 1 or {"-m", "--multirun"} & set(arguments), "several values without -m"
    for job in jobs:
        config = compose_config(override for override in job if not override.startswith("hydra."))
        spec = BucketSpec("unit", (("weight", 10**6),), config.cluster.ranks, 0, torch.device("meta"), seed=0)
        method = COMPRESSORS[config.compressor.name](config.compressor, spec, resolve_backend("reference")[1])
        assert method.explain_dense() is None, "an example that never compresses"
    return len(jobs)


def _commands(program: str) -> list[list[str]]:
    """Of the README and of docs/, each command once."""
    pages = [README, *sorted(ROOT.glob("docs/*.md"))]
    commands = {tuple(c): c for page in pages for c in find_commands(page.read_text()) if c[0] == program}
    return list(commands.values())


def test_the_readme_shows_both_first_commands_and_a_run() -> None:
    commands = find_commands(README.read_text())
    assert ["make", "run"] in commands and ["make", "test"] in commands
    assert any(command[0] == "python" for command in commands)


@pytest.mark.parametrize("command", _commands("make"), ids=shlex.join)
def test_make_targets_exist(command: list[str]) -> None:
    done = subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", _commands("python"), ids=shlex.join)
def test_run_commands_compose(command: list[str]) -> None:
    assert compose_command(command[2:]) >= 1


def missing_modules(markdown: str) -> set[str]:
    """Modules of this project that ``python -m`` is said to run, and that do not exist."""
    named = set(re.findall(r"python3? -m ((?:tagc|experiments|analysis|tests)\.[\w.]*\w)", markdown))
    places = {module: ROOT / module.replace(".", "/") for module in named}
    return {m for m, at in places.items() if not (at.with_suffix(".py").exists() or (at / "__main__.py").exists())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_exist(page: Path) -> None:
    assert missing_modules(page.read_text()) == set()


def test_a_missing_module_is_found() -> None:
    text = "`python -m experiments.nothing --out x`, python -m experiments.gpu_check; python -m tagc.data.prepare."
    assert missing_modules(text) == {"experiments.nothing"}


def missing_files(text: str) -> set[str]:
    """Modules and configuration files of this project that a text names by their path and that do not exist.

    Those of an older commit may be gone, where the same table cell says "as of commit".
    """
    path = r"(?<![\w./-])((?:tagc|experiments|analysis|conf|tests)/[\w./-]*\.(?:py|yaml))\b"
    named = set(re.findall(path + r"(?![^|\n]*as of commit)", text))
    return {path for path in named if not (ROOT / path).exists()}


@pytest.mark.parametrize(
    "page",
    # the changelog tells of files that are gone, too
    [page for page in (*PAGES, *sorted(ROOT.glob("conf/**/*.yaml"))) if page.name != "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_files_exist(page: Path) -> None:
    assert missing_files(page.read_text()) == set()


def test_a_missing_file_is_found() -> None:
    text = "`tagc/config.py` (see [schema](../tagc/config/schema.py), tagc/config/schema.py, outputs/tagc/nothing.py)"
    assert missing_files(text) == {"tagc/config.py"}


TINY = "model.layers=1 model.width=48 model.heads=3 model.context=16 compressor.min_numel=512 trainer.max_steps=1"


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "command",
    [c for c in _commands("python") if not {"-m", "data=bin", "data=openwebtext", "experiment=main"} & set(c)][:1],
    ids=shlex.join,
)
def test_run_commands_on_built_in_data_run(command: list[str], tmp_path: Path) -> None:
    """As written, but for one step of a tiny model."""
    changes = [*TINY.split(), "bandwidth=unlimited", "logging.wandb=disabled", f"hydra.run.dir={tmp_path}"]
    kept = [word for word in command[2:] if word.split("=")[0] not in {change.split("=")[0] for change in changes}]
    done = subprocess.run(
        [sys.executable, "run.py", *kept, *changes], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "summary.json").exists()


def test_commands_are_found_and_a_sweep_is_expanded() -> None:
    text = "```bash\nmake run  # all\npython run.py -m \\\n  compressor=fsdp,tagc2 seed=0,1\nls\n```\nmake nothing\n"
    commands = find_commands(text)
    assert commands == [["make", "run"], ["python", "run.py", "-m", "compressor=fsdp,tagc2", "seed=0,1"]]
    assert compose_command(commands[1][2:]) == 4
    with pytest.raises(AssertionError, match="without -m"):
        compose_command(["seed=0,1"])
