"""Files of the cells of ``experiments/iteration_time``: several arms that took turns under one link."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tagc.errors import UserError

NETWORKS = ("namespaces", "paced")
NEEDED_KEYS = ("cell", "setting", "link", "memory", "expected_gradient_bytes", "git_commit", "versions", "hardware")
NEEDED_COLUMNS = ("arm", "phase", "block", "turn_step", "iteration_ms", "grad_wire_bytes", "param_wire_bytes")


class Cell(NamedTuple):
    """What all rows of a cell share (settings, link, machine, commit, memory), and its rows: one per arm and step."""

    shared: dict[str, Any]
    rows: pd.DataFrame

    @property
    def machine(self) -> str:
        """The machine as tables name it."""
        return describe_machine(self.shared["hardware"])

    def is_counted(self, arm: str) -> bool:
        """Whether the exchange counted the arm's bytes; torch's own methods are seen by the interface alone."""
        return self.shared["expected_gradient_bytes"].get(arm) is not None


def describe_machine(hardware: dict[str, Any]) -> str:
    """One line: GPUs if there are any, CPU, cores."""
    gpus = ", ".join(hardware.get("gpus") or [])
    cpu = f"{hardware.get('cpu_model') or 'unknown CPU'}, {hardware.get('cpu_cores_usable', '?')} cores"
    return f"{gpus}; {cpu}" if gpus else cpu


def load_cell(path: Path) -> Cell:
    """The cell whose shared part is ``path`` (``.json``), its rows beside it (``.csv``).

    Errors: ``UserError`` naming the file when it is missing, damaged, or lacks keys, columns or an arm's rows.
    """
    csv_path = path.with_suffix(".csv")
    try:
        shared = json.loads(path.read_text(encoding="utf-8"))
        rows = pd.read_csv(csv_path)
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        raise UserError(f"{path} or its .csv cannot be read ({error}); measure the cell again") from error
    missing = [key for key in NEEDED_KEYS if key not in shared]
    missing += [column for column in NEEDED_COLUMNS if column not in rows]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; it was not recorded by this version")
    steps = rows[rows["phase"] == "blocks"].groupby("arm").size()
    expected = shared["cell"]["blocks"] * shared["cell"]["block_steps"]
    short = [arm for arm in shared["cell"]["arms"] if steps.get(arm, 0) != expected]
    if short:
        raise UserError(f"{csv_path}: not {expected} rows of blocks for {', '.join(short)}; measure the cell again")
    return Cell(shared, rows)


def load_cells(rows_dir: Path | str, networks: Iterable[str] = NETWORKS) -> list[Cell]:
    """Every recorded cell, networks in the given order. Errors: ``UserError`` naming the folder if it holds none."""
    paths = [path for network in networks for path in sorted((Path(rows_dir) / network).glob("*.json"))]
    if not paths:
        raise UserError(f"{rows_dir} holds no recorded cells; measure some: python -m experiments.iteration_time")
    return [load_cell(path) for path in paths]
