"""The final table of a run or a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

Row = dict[str, Any]


def _number(value: Any, pattern: str) -> str:
    return format(value, pattern) if isinstance(value, int | float) else "-"


def _iteration(row: Row) -> str:
    median = _number(row.get("iteration_ms_median"), ".1f")
    if row.get("iteration_ms_p20") is None or row.get("iteration_ms_p80") is None:
        return median
    return f"{median} ({row['iteration_ms_p20']:.1f}-{row['iteration_ms_p80']:.1f})"


def _key(key: str, pattern: str, scale: float = 1.0) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(key)
        return _number(value * scale if isinstance(value, int | float) else value, pattern)

    return cell


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key, "-"))


_IDENTITY: list[tuple[str, Callable[[Row], str]]] = [
    (key, _text(key)) for key in ("compressor", "bandwidth", "model", "ranks", "seed", "status")
]
_RESULTS: list[tuple[str, Callable[[Row], str]]] = [
    ("iteration ms (p20-p80)", _iteration),
    ("tokens/s", _key("tokens_per_s", ",.0f")),
    ("train loss", _key("train_loss", ".3f")),
    ("val loss", _key("val_loss", ".3f")),
    ("sparsity", _key("achieved_sparsity", ".3f")),
    ("union density", _key("union_density", ".3f")),
    ("peeled", _key("peeled_frac", ".4f")),
]


def _byte_columns(rows: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """One column per kind of traffic that any run recorded, the total first."""
    suffix = "wire_bytes_per_step"
    keys = sorted({key for row in rows for key in row if key.endswith(suffix)}, key=lambda key: (key != suffix, key))
    return [(f"{key.removesuffix(suffix).rstrip('_') or 'all'} MB/step", _key(key, ".3f", 1e-6)) for key in keys]


def build_table(rows: Sequence[Row]) -> Table:
    """A table of ``summary.json`` contents: one run downwards, several as one row each. MB are 10^6 bytes."""
    columns = _IDENTITY + _RESULTS[:2] + _byte_columns(rows) + _RESULTS[2:]
    if len(rows) == 1:
        table = Table("", "value", title="summary")
        for name, cell in columns:
            table.add_row(name, cell(rows[0]))
        return table
    table = Table(*(name for name, _ in columns), title=f"{len(rows)} runs")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table
