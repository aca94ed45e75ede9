"""Columns are declared once: a run writes what is declared, and every view shows its part."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tagc.network import Counters
from tagc.record import final_table, load_rows, sweep_table
from tagc.record.columns import (
    LAYER_COLUMNS,
    STATISTICS,
    STEP_COLUMNS,
    SUMMARY_COLUMNS,
    WANDB_COLUMNS,
    Column,
    cell_decimals,
    thinned,
)

ROOT = Path(__file__).parents[2]
TINY = (
    *("model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "compressor=tagc2"),
    *("compressor.min_numel=64", "trainer.global_batch=4", "trainer.timing_warmup_steps=1", "trainer.eval_every=4"),
    *("logging.fidelity_every=6", "logging.histograms_every=2", "logging.wandb=disabled", "bandwidth.rate_mbps=1e7"),
    *("trainer.profile=true", "trainer.checkpoint_every=4", "data=bin", "data.vocab_size=256", "network=paced"),
)


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Rows, rows of the layers and summary of a run on two ranks that is continued for two steps more."""
    folder = tmp_path_factory.mktemp("run")
    for name, count in (("train", 20_000), ("val", 2_000)):
        np.random.default_rng(0).integers(256, size=count).astype(np.uint16).tofile(folder / f"{name}.bin")
    for steps in (8, 10):
        options = [f"data.path={folder}", f"hydra.run.dir={folder / 'run'}", f"trainer.max_steps={steps}"]
        command = [sys.executable, str(ROOT / "run.py"), *TINY, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    run_dir = folder / "run"
    rows, layers = load_rows(run_dir / "metrics.jsonl"), load_rows(run_dir / "layers.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    return rows, layers, json.loads((run_dir / "summary.json").read_text())


def find_faults(row: dict[str, Any], columns: tuple[Column, ...]) -> list[str]:
    """How a row differs from the declaration."""
    known = {column.name: column for column in columns}
    faults = [f"{key} is not declared" for key in row.keys() - known.keys()]
    faults += [f"{name} is missing" for name, column in known.items() if not column.when and row.get(name) is None]
    for name, value in row.items():
        kind = known[name].kind if name in known else object
        kinds = (int, float) if kind is float else kind
        if value is not None and (
            not isinstance(value, kinds) or (isinstance(value, bool) and kind not in (bool, object))
        ):
            faults.append(f"{name} holds {value!r}")
    return faults


def test_a_row_that_differs_from_the_declaration_is_found():
    columns = (Column("a", "", "always", int), Column("b", "", "sometimes", when="now and then"))
    assert find_faults({"a": 1, "b": None}, columns) == [] == find_faults({"a": 1, "b": 2}, columns)
    assert find_faults({"a": True, "b": "x", "c": 0}, columns) == ["c is not declared", "a holds True", "b holds 'x'"]
    assert find_faults({"b": 0.5}, columns) == ["a is missing"]


def test_a_run_writes_and_reads_every_column(record):
    for rows, columns in zip(record, (STEP_COLUMNS, LAYER_COLUMNS, SUMMARY_COLUMNS), strict=True):
        rows = [rows] if isinstance(rows, dict) else rows
        assert [fault for row in rows for fault in find_faults(row, columns)] == []
        written = {name for row in rows for name, value in row.items() if value is not None}
        unwritten = {column.name for column in columns} - written
        # Interfaces that count exist in namespaces only; a run that did not fail has no error.
        counted = {f"link_{name}" for name in Counters._fields}
        assert unwritten <= counted | {f"{name}_median" for name in counted} | {"error"}
    assert {f"link_{name}" for name in Counters._fields} <= {column.name for column in STEP_COLUMNS}


def test_the_summary_is_that_of_the_rows(record):
    rows, _, summary = record
    timed = [row for row in rows[1:] if not {"profiled", "resumed", "fidelity_cosine"} & row.keys()]
    timed = [row for row in timed if row["time_dilation"] is not None]
    assert summary["timed_steps"] == len(timed) > 0
    for column in STEP_COLUMNS:
        values = [row[column.name] for row in timed if row.get(column.name) is not None]
        if column.summary == "median" and values:
            assert summary[f"{column.name}_median"] == pytest.approx(float(np.median(values)))
        if column.summary == "per_step":
            assert summary[f"{column.name}_per_step"] == pytest.approx(float(np.mean(values)))
    assert summary["val_loss"] == rows[-1]["val_loss"]
    assert math.isclose(summary["train_loss_last10"], float(np.mean([row["train_loss"] for row in rows])))


def test_every_view_shows_its_columns(record):
    summary = record[2]
    names = [str(cell) for cell in final_table(summary).columns[0].cells]
    assert {column.final[0] for column in STEP_COLUMNS if column.final} <= set(names)
    headers = [str(column.header) for column in sweep_table([summary, summary]).columns]
    assert [h for column in STEP_COLUMNS for h in column.sweep] == headers[-sum(len(c.sweep) for c in STEP_COLUMNS) :]


def test_declarations_make_sense():
    for columns in (STEP_COLUMNS, LAYER_COLUMNS, SUMMARY_COLUMNS):
        names = [column.name for column in columns]
        assert len(names) == len(set(names))
        for column in columns:
            assert column.meaning and column.kind in (int, float, str, bool)
            assert column.summary in ("", *STATISTICS) and column.thin in ("", "mean", "median", "last")
            assert len(column.sweep) in (0, 2 if column.summary == "spread" else 1)
            assert column.summary or not (column.sweep or column.final)  # tables show the summary
    assert {"step", "val_loss"} <= set(thinned("last"))
    assert cell_decimals()["iteration_ms"] == 1 and cell_decimals()["grad_wire_bytes"] is None


def test_the_printed_page_tells_every_column():
    command = [sys.executable, "-m", "tagc.record.columns"]
    page = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for column in (*STEP_COLUMNS, *LAYER_COLUMNS, *SUMMARY_COLUMNS, *WANDB_COLUMNS):
        (line, *_) = [line for line in page.splitlines() if line.startswith(f"| `{column.name}` |")]
        assert column.meaning in page and line.count("|") == 7
