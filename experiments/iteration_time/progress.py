"""The bar of a whole plan: in estimated seconds, so that the time left follows from the cells still to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.iteration_time.closed_form import START_S, estimate_cell_s
from experiments.iteration_time.plan import Cell

POLL_S = 2.0


class PlanProgress:
    """A bar over ``cells`` on a terminal, a line per cell elsewhere. The time left is an estimate."""

    def __init__(self, cells: Sequence[Cell], console: Console) -> None:
        self._console = console
        self._estimate_s = {cell.key: estimate_cell_s(cell) for cell in cells}
        self._begun = 0
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        # Long windows: cells differ in how far the estimate is off.
        self._bar = Progress(
            *columns,
            TextColumn("left, estimated"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=1,
            speed_estimate_period=3600,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("iteration time", total=sum(self._estimate_s.values()) or None)

    def __enter__(self) -> Self:
        minutes = sum(self._estimate_s.values()) / 60
        self.say(f"{len(self._estimate_s)} cells to measure, about {minutes:.0f} min on a quiet machine, estimated")
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, message: str) -> None:
        """One line above the bar."""
        self._console.print(message, highlight=False)

    @contextmanager
    def follow(self, cell: Cell, rows: Path) -> Iterator[None]:
        """Advance with the lines of ``rows``, which the cell's rank 0 writes; at the end by the rest."""
        self._begun += 1
        left_s = sum(list(self._estimate_s.values())[self._begun - 1 :])
        label = f"cell {self._begun}/{len(self._estimate_s)} {cell.key}"
        self._bar.update(self._task, description=label)
        if not self._console.is_terminal:
            self.say(f"{label}; about {left_s / 60:.0f} min left, estimated")
        begin_s = sum(self._estimate_s.values()) - left_s
        ended = threading.Event()
        watch = partial(self._watch, cell, rows, begin_s, time.time(), ended)
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._bar.update(self._task, completed=begin_s + self._estimate_s[cell.key])

    def _watch(self, cell: Cell, rows: Path, begin_s: float, started_s: float, ended: threading.Event) -> None:
        total = cell.steps * len(cell.arms)
        while not ended.wait(POLL_S):
            with suppress(FileNotFoundError):
                if rows.stat().st_mtime < started_s:
                    continue  # of an earlier, interrupted launch
                steps = rows.read_bytes().count(b"\n")
                stepping_s = self._estimate_s[cell.key] - START_S
                self._bar.update(self._task, completed=begin_s + START_S + stepping_s * steps / total)
