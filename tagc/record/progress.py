"""What a person sees while a run trains: a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import logging
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tagc.record.columns import STEP_COLUMNS

logger = logging.getLogger("tagc")


def describe_step(row: dict[str, Any]) -> list[str]:
    """What the declared columns say of a row on the console: losses, step time and bytes, as far as it has them."""
    shown = [column for column in STEP_COLUMNS if column.line and column.name in row]
    parts = [column.line(row[column.name]) for column in shown if column.line]
    return [part for part in parts if part]


class StepDisplay:
    """Shows rows (``step`` counts finished optimizer steps, from 1) of a run of ``total`` steps.

    Step lines go through logger ``tagc`` every ``console_every`` steps, at the first and last step and at evaluations:
    so they are in ``log.txt`` everywhere and on stdout in a pipe. On a terminal a bar takes their place.
    The step time of a line is the median since the line before.
    """

    def __init__(self, total: int, console_every: int, console: Console) -> None:
        self._total, self._console_every = total, console_every
        self._since_line_ms: list[float] = []
        self._first = True
        self._unshown: dict[str, Any] | None = None
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[note]}"))
            # Few redraws: the bar's thread shares the cores with the ranks.
            self._bar = Progress(
                *columns, TextColumn("ETA"), TimeRemainingColumn(), console=console, refresh_per_second=4
            )
            self._task = self._bar.add_task("train", total=total, note="")
            self._bar.start()

    def update(self, row: dict[str, Any]) -> None:
        """Show one row."""
        if row.get("iteration_ms") is not None:
            self._since_line_ms.append(row["iteration_ms"])
        if self._bar is not None:
            note = "  ".join(describe_step(row))
            self._bar.update(self._task, completed=row["step"], note=note)
        step = row["step"]
        due = step % self._console_every == 0 or step >= self._total or row.get("val_loss") is not None
        self._unshown = row
        if self._first or due:
            self._write_line(row)

    def _write_line(self, row: dict[str, Any]) -> None:
        iteration_ms = median(self._since_line_ms) if self._since_line_ms else None
        shown = describe_step(row | {"iteration_ms": iteration_ms})
        text = "  ".join([f"step {row['step']}/{self._total}", *shown])
        logger.info(text, extra={"step_line": True})
        self._first, self._unshown = False, None
        self._since_line_ms.clear()

    def close(self) -> None:
        """Show the last row if it was not shown (a run that stopped early) and take the bar away."""
        if self._unshown is not None:
            self._write_line(self._unshown)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
