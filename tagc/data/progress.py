"""A progress bar for work that takes seconds, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn


@contextmanager
def track_progress(label: str, total: float | None, *, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Yield ``advance(amount)``. The bar goes to stderr and vanishes at the end; ``total=None``: a spinner only."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)
