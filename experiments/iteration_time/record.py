"""The recorded rows of a cell: ``<key>.csv``, one line per arm and step, and ``<key>.json``, what all lines share.

Both are written when the cell has ended; the json comes last: a cell without it is rerun.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.iteration_time.plan import Cell, describe_cell
from tagc.host.files import write_text_atomic
from tagc.record import load_rows
from tagc.record.columns import cell_decimals
from tagc.record.manifest import NUMBER_KEYS

ROWS_DIR = Path(__file__).with_name("rows")
#: column -> decimals; what a step's row holds beyond these stays in the run folder
COLUMNS = {"arm": None, "phase": None, "block": None, "turn_step": None} | cell_decimals()


def _paths(rows_dir: Path, cell: Cell) -> tuple[Path, Path]:
    folder = rows_dir / cell.network
    return folder / f"{cell.key}.csv", folder / f"{cell.key}.json"


def is_recorded(rows_dir: Path, cell: Cell) -> bool:
    """Whether the folder holds this cell, measured with these settings (newer keys pass)."""
    path = _paths(rows_dir, cell)[1]
    if not path.exists():
        return False
    recorded, current = json.loads(path.read_text())["settings"], describe_cell(cell)
    return all(key in current and current[key] == value for key, value in recorded.items())


def record_cell(rows_dir: Path, cell: Cell, run_dir: Path, summary: dict[str, Any]) -> None:
    """Turn a finished run folder into the cell's two files."""
    csv_path, json_path = _paths(rows_dir, cell)
    csv_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.unlink(missing_ok=True)
    frame = pd.DataFrame(load_rows(run_dir / "metrics.jsonl")).reindex(columns=list(COLUMNS))
    decimals = {column: digits for column, digits in COLUMNS.items() if digits is not None}
    counts = frame.columns[frame.columns.str.endswith(("_bytes", "_buckets"))]
    frame = frame.astype(dict.fromkeys(decimals, float)).round(decimals).astype(dict.fromkeys(counts, "Int64"))
    write_text_atomic(csv_path, frame.to_csv(index=False))
    shared = {
        "settings": describe_cell(cell),
        "setting": cell.setting,
        **{key: summary[key] for key in ("cell", "link", "memory", "expected_gradient_bytes")},
    }
    shared |= {key: summary[key] for key in NUMBER_KEYS}
    write_text_atomic(json_path, json.dumps(shared, indent=1) + "\n")
