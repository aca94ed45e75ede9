"""How an experiment records its rows: CSV files that are complete up to the last finished row."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """For a module's command; description: its docstring, shown as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def write_rows(path: Path | None, rows: Iterable[Row], columns: Sequence[str] = ()) -> None:
    """Write each row as soon as ``rows`` gives it, in place of what the file held.

    path: None for standard output. columns: of the file; those of the first row if not given (no row: an empty file).
    Errors: ``ValueError`` for a row with another column.
    """
    with path.open("w", newline="", encoding="utf-8") if path else nullcontext(sys.stdout) as file:
        writer = None
        if columns:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            file.flush()


def append_row(path: Path, row: Row, columns: Sequence[str]) -> None:
    """Add a row to the file, which gets its header with the first. Errors: ``ValueError`` for another column."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
