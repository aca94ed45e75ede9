"""``metrics.jsonl``: one flat JSON object per optimizer step, the truth about a run.

``layers.jsonl`` holds the like for every layer, every ``logging.histograms_every`` steps.

A non-finite float is written as ``null``: JSON has no NaN, and a reader in any language must be able to load the file.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tagc.errors import UserError
from tagc.host.files import explain_write_errors, write_text_atomic

logger = logging.getLogger("tagc")
Row = dict[str, Any]


def clean_row(row: Row) -> Row:
    """The row as it is stored: plain scalars, with ``None`` in place of NaN and infinities.

    Errors: ``TypeError`` naming the key when ``step`` is not an int or a value is not int, float, str, bool or None.
    """
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"a metrics row needs an int `step`, got {step!r}")
    for key, value in row.items():
        if not isinstance(key, str) or not isinstance(value, int | float | str | bool | None):
            raise TypeError(f"metrics row {key!r} holds a {type(value).__name__}; use int, float, str, bool or None")
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class MetricsFile:
    """Appends rows to a file of rows; every row has reached the operating system when :meth:`append` returns.

    Rows that cannot be written (a checkpoint may fill the disk for a moment) wait in memory, in order, for the next
    :meth:`append`, and for the last time for :meth:`close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        with explain_write_errors(path.parent):
            # Unbuffered: a failed write leaves nothing behind that close() would try to write again.
            self._file = path.open("ab", buffering=0)

    def append(self, row: Row) -> None:
        """Write one cleaned row."""
        was_behind = bool(self._waiting)
        self._waiting += (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            if not was_behind:
                logger.error("%s cannot be written (%s); its rows wait in memory", self.path, error.strerror)

    def _write(self) -> None:
        while self._waiting:  # a nearly full disk may take only part of a write
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Errors: ``UserError`` naming the folder when rows cannot be written (disk full)."""
        try:
            with explain_write_errors(self.path.parent):
                self._write()
        finally:
            self._waiting = b""
            self._file.close()


def load_rows(path: Path) -> list[Row]:
    """Read ``metrics.jsonl`` or ``layers.jsonl``. A torn last line (the run was killed while it wrote) is left out.

    Errors: ``UserError`` naming file and line for a missing file or any other line that is not one JSON object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name the folder of a recorded run") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            # The piece after the last newline is empty in a whole file and a torn row in an interrupted one.
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: not JSON ({error}); repair or remove the line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: holds {row!r}, not one JSON object; repair or remove the line")
        rows.append(row)
    return rows


def salvage_rows(path: Path) -> list[Row]:
    """The rows that can be read of a file that may be damaged or missing, for the record of a failure."""
    rows: list[Row] = []
    with suppress(OSError):
        for line in Path(path).read_bytes().split(b"\n"):
            with suppress(ValueError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) and isinstance(row.get("step"), int) else []
    return rows


def rewrite_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace the file by these rows, at once. Errors: ``UserError`` naming the folder."""
    write_text_atomic(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def cut_rows(path: Path, step: int) -> int:
    """Drop the rows after ``step`` and a torn last line; returns how many are left. No file: 0.

    Errors: ``UserError`` naming the folder.
    """
    if not path.exists():
        return 0
    kept = [row for row in load_rows(path) if row["step"] <= step]
    rewrite_rows(path, kept)
    return len(kept)


class RowReader:
    """Reads a file of rows while it grows. What the file held when it was opened comes first."""

    def __init__(self, path: Path) -> None:
        self.path, self._position = path, 0

    def read_new(self) -> list[Row]:
        """The rows that were completed since the last call; none while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._position += len(whole) + len(newline)
        return [json.loads(line) for line in whole.split(b"\n") if line]
