"""The live table of a sweep: on a terminal, every point with its state, in place of what its runs would print.

What it shows comes from the points' folders, so points on this machine and tasks of a SLURM array look alike.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from tagc.host.signals import block_signals
from tagc.sweep.identity import Point
from tagc.sweep.states import State, load_json, read_own_state

REFRESH_S = 1.0
POINTS_PER_S = 100  # a larger sweep is looked at less often, for the file system's sake
OTHER_LINES = 8  # of a terminal's height: title, header and what is printed above the table
TAIL_BYTES = 16_384  # more than the last row of metrics.jsonl
_FORMS = (".3f", ".3f", ".0f")  # of losses and milliseconds
_ORDER = (State.RUNNING, State.FAILED, State.INTERRUPTED, State.PENDING, State.DONE)  # what is shown if not all fits
_STYLES = {State.RUNNING: "bold", State.DONE: "green", State.FAILED: "bold red", State.INTERRUPTED: "yellow"}


@contextmanager
def live_table(points: Sequence[Point], sweep_dir: Path) -> Iterator[bool]:
    """While the block runs, a terminal shows the points; yields whether it does. Elsewhere nothing changes.

    What this process and its children write appears above the table; ranks keep all but warnings to their ``log.txt``.
    """
    from rich.console import Console

    if not sys.stdout.isatty() or Console().is_dumb_terminal:
        yield False
        return
    from rich.live import Live

    from tagc.launch import shield_resource_tracker, stop_server
    from tagc.record.console import QUIET_VARIABLE

    sys.stdout.flush()
    shield_resource_tracker()  # a helper of the first run else, which would keep the pipes open to the end
    console = Console(file=os.fdopen(os.dup(1), "w", encoding="utf-8"))  # stays open for what a child says too late
    table = StateTable(points, sweep_dir, console)
    interval_s = max(REFRESH_S, len(points) / POINTS_PER_S)
    live = Live(
        console=console,
        get_renderable=table.render,
        refresh_per_second=1 / interval_s,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with ExitStack() as stack:
        with block_signals(signal.SIGINT):  # Ctrl-C is the main thread's, which blocks it at times
            stack.enter_context(live)
            stack.enter_context(_divert(1, console))
            stack.enter_context(_divert(2, console))
            stack.callback(stop_server)  # it would keep the pipes open
        os.environ[QUIET_VARIABLE] = "1"
        stack.callback(os.environ.pop, QUIET_VARIABLE)
        yield True


@contextmanager
def _divert(descriptor: int, console: Any) -> Iterator[None]:
    """Print the lines that this process and its children write to a descriptor above the live table."""
    saved = os.dup(descriptor)
    reading, writing = os.pipe()
    os.dup2(writing, descriptor)
    os.close(writing)
    pump = threading.Thread(target=_pump, args=(os.fdopen(reading, errors="replace"), console), daemon=True)
    pump.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, descriptor)
        os.close(saved)
        pump.join(timeout=1)  # longer only if a child outlives the sweep; its lines still appear


def _pump(lines: TextIO, console: Any) -> None:
    with lines:
        for line in lines:
            console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


def read_last_row(run_dir: Path) -> dict[str, Any]:
    """The newest complete row of ``metrics.jsonl``; nothing if there is none."""
    with suppress(OSError, ValueError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        whole = file.read().rpartition(b"\n")[0]
        row = json.loads(whole.rpartition(b"\n")[2])
        return row if isinstance(row, dict) else {}
    return {}


class StateTable:
    """What the folders say, as a table that fits the console."""

    def __init__(self, points: Sequence[Point], sweep_dir: Path, console: Any) -> None:
        self._points, self._sweep_dir, self._console = points, sweep_dir, console
        shared = set.intersection(*(set(point.shown) for point in points)) if len(points) > 1 else set()
        self._settings = {p.number: " ".join(word for word in p.shown if word not in shared) for p in points}
        self._started_s = time.monotonic()
        self._done: dict[int, dict[str, Any]] = {}  # summaries; a point that is done stays so
        self._done_before = sum(state is State.DONE for state in self._read_states())

    def _read_states(self) -> list[State]:
        states = []
        for point in self._points:
            state = State.DONE if point.number in self._done else read_own_state(point.run_dir)
            if state is State.DONE and point.number not in self._done:
                self._done[point.number] = load_json(point.run_dir / "summary.json")
            states.append(state)
        return states

    def render(self) -> Any:
        """The table as of now."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        states = self._read_states()
        with suppress(OSError, ValueError):  # rich would ask the descriptors that are pipes now
            if all(size := os.get_terminal_size(self._console.file.fileno())):
                self._console.size = size
        title = Text(self._describe(states), no_wrap=True, overflow="ellipsis")
        table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left")
        for header in ("#", "state", "step", "loss", "val loss", "ms/step"):
            table.add_column(header, justify="left" if header == "state" else "right", no_wrap=True)
        table.add_column("point")
        pairs = list(zip(self._points, states, strict=True))
        room = max(3, self._console.height - OTHER_LINES)
        if len(pairs) > room:  # what a person would look for first; of the done and the pending the nearest
            pairs.sort(key=lambda pair: (_ORDER.index(pair[1]), pair[0].number))
        for point, state in sorted(pairs[:room], key=lambda pair: pair[0].number):
            numbers = self._show_numbers(point, state)
            settings = Text(self._settings[point.number], no_wrap=True, overflow="ellipsis")
            table.add_row(str(point.number), Text(state, style=_STYLES.get(state, "dim")), *numbers, settings)
        if len(pairs) > room:
            table.caption = f"and {len(pairs) - room} more"
        return table

    def _describe(self, states: Sequence[State]) -> str:
        """Counts, time spent, and the time left as the points that ended under this command suggest."""
        told = ", ".join(f"{states.count(state)} {state}" for state in State if state in states)
        spent_s = time.monotonic() - self._started_s
        ended = states.count(State.DONE) - self._done_before
        left = len(states) - states.count(State.DONE) - states.count(State.FAILED)
        guess = f", about {_minutes(spent_s / ended * left)} left" if ended and left else ""
        return f"{told}; {_minutes(spent_s)}{guess}; {self._sweep_dir}"

    def _show_numbers(self, point: Point, state: State) -> list[str]:
        """Steps, losses and the time of a step, as far as they are known."""
        if state is State.PENDING:
            return [""] * 4
        if summary := self._done.get(point.number):
            names = ("steps", "train_loss", "val_loss", "iteration_ms_median")
            steps, *numbers = (summary.get(name) for name in names)
        else:
            row = read_last_row(point.run_dir)
            steps, *numbers = (row.get(name) for name in ("step", "train_loss", "val_loss", "iteration_ms"))
        shown = ("" if value is None else f"{value:{form}}" for value, form in zip(numbers, _FORMS, strict=True))
        return ["" if steps is None else f"{steps}/{point.config.trainer.max_steps}", *shown]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
