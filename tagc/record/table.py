"""The table at the end of a run or a sweep; readable in a pipe of 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tagc.network.link import format_rate
from tagc.record.columns import STEP_COLUMNS, Column
from tagc.record.console import get_console

MISSING = "-"
SETTINGS = ("compressor", "bandwidth", "network", "ranks", "seed", "model")
HEADERS = {"compressor": "com-\npressor", "bandwidth": "band-\nwidth"}  # no wider than their values
Summary = dict[str, Any]


def _format(value: Any, form: Callable[[Any], str]) -> str:
    return MISSING if value is None else form(value)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}" if count < 1e7 else f"{count / 1e6:.0f}"


#: unit of a column -> how tables show its values
FORMATS: dict[str, Callable[[Any], str]] = {
    "ms": _milliseconds,
    "bytes": lambda count: decimal(round(count)),
    "share": lambda share: f"{share:.1%}",
    "nats": lambda loss: f"{loss:.3f}",
    "tokens": lambda rate: f"{rate:,.0f}",
}


def _link(summary: Summary) -> str:
    rate_mbps, dilation = summary.get("rate_mbps"), summary.get("time_dilation", 1)
    name = str(summary.get("bandwidth", MISSING))
    if rate_mbps is None:
        return name
    if dilation is None:  # the run ended before it was known
        return f"{name}: not capped yet, {summary.get('network', MISSING)}"
    dilated = f" (time dilation {dilation:.4g})" if dilation != 1 else ""
    return f"{name}: {format_rate(rate_mbps / dilation)}{dilated}, {summary.get('network', MISSING)}"


def _steps(summary: Summary) -> str:
    lost = f", the rows of {summary['missing_rows']} are missing" if summary.get("missing_rows") else ""
    return f"{summary.get('steps', MISSING)} ({summary.get('timed_steps', MISSING)}){lost}"


HEAD: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("status", lambda s: str(s.get("status", MISSING))),
    ("error", lambda s: str(s.get("error", MISSING))),
    ("run", lambda s: f"{s.get('model', MISSING)}, {s.get('ranks', MISSING)} ranks, seed {s.get('seed', MISSING)}"),
    ("compressor", lambda s: str(s.get("compressor", MISSING))),
    ("bandwidth", _link),
    ("steps (timed)", _steps),
)


def _show(column: Column, summary: Summary) -> str:
    """A column's numbers in one text."""
    first, *rest = (_format(summary.get(name), FORMATS.get(column.unit, str)) for name in column.summary_names)
    if column.summary == "spread":
        return f"{first} ({_join_spread(rest)})"
    return f"{first} (last 10: {rest[0]})" if column.summary == "loss" else first


def _join_spread(ends: Sequence[str]) -> str:
    return MISSING if MISSING in ends else "-".join(ends)


def _measured_rows(summary: Summary) -> dict[str, str]:
    """The final table's rows of declared columns; several columns may share a row."""
    rows: dict[str, str] = {}
    for column in STEP_COLUMNS:
        if column.final is None:
            continue
        name, label = column.final
        is_same_as_measured = column.name == "scaled_iteration_ms" and summary.get("time_dilation") in (None, 1)
        value = MISSING if is_same_as_measured else _show(column, summary)
        rows[name] = f"{rows[name]}  {label} {value}" if name in rows else f"{label} {value}".lstrip()
    return rows


def _sweep_cells(column: Column, summary: Summary) -> list[str]:
    """A column's numbers in a sweep's table, one per heading."""
    form = _megabytes if column.unit == "bytes" else FORMATS.get(column.unit, str)
    first, *rest = (_format(summary.get(name), form) for name in column.summary_names)
    return [first, _join_spread(rest)] if column.summary == "spread" else [first]


def final_table(summary: Summary) -> Table:
    """One run as two columns, name and value. Times are measured; bytes are those one step moves."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    head = {name: value(summary) for name, value in HEAD if name != "error" or "error" in summary}
    for name, text in (head | _measured_rows(summary)).items():
        table.add_row(Text(name), Text(text))
    return table


def _known_values(summaries: Sequence[Summary], key: str) -> list[Any]:
    """The different values of a setting, as far as the runs came to be; one that never started has none."""
    return list(dict.fromkeys(summary[key] for summary in summaries if summary.get(key) is not None))


def _varied_settings(summaries: Sequence[Summary]) -> list[str]:
    """The settings in which the runs differ, what a reader compares first in front; status if a run is not done."""
    varied = [key for key in SETTINGS if len(_known_values(summaries, key)) > 1]
    unfinished = any(summary.get("status") != "done" for summary in summaries)
    return ["status", *varied] if unfinished else varied


def sweep_table(summaries: Sequence[Summary], columns: Sequence[str] | None = None) -> Table:
    """Several runs, a row each. A setting that all runs share moves to the title.

    columns: the settings that get a column; None: all that vary.
    """
    varied = _varied_settings(summaries)
    columns = varied if columns is None else columns
    shared = [f"{key} {value}" for key in SETTINGS if key not in varied for value in _known_values(summaries, key)]
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=", ".join(shared), title_justify="left")
    table.add_column("#", justify="right")
    for key in columns:
        table.add_column(HEADERS.get(key, key), no_wrap=True)
    measured = [column for column in STEP_COLUMNS if column.sweep]
    for heading in (heading for column in measured for heading in column.sweep):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, summary in enumerate(summaries):
        settings = [Text(str(summary.get(key, MISSING))) for key in columns]
        numbers = [Text(text) for column in measured for text in _sweep_cells(column, summary)]
        table.add_row(str(number), *settings, *numbers)
    return table


def _fitting_columns(summaries: Sequence[Summary], console: Console) -> list[str]:
    """The varied settings that fit beside the numbers; the lines below the table give the others."""
    columns = _varied_settings(summaries)
    unlimited = console.options.update(max_width=10_000)
    while columns and console.measure(sweep_table(summaries, columns), options=unlimited).maximum > console.width:
        columns.pop()
    return columns


def print_table(summaries: Sequence[Summary], console: Console | None = None) -> None:
    """Print the end of a run (one summary) or of a sweep (several) to stdout, the run folders below the table."""
    if not summaries:
        return
    console = console or get_console()
    folders = [str(summary.get("run_dir", MISSING)) for summary in summaries]
    if len(summaries) == 1:
        console.print(final_table(summaries[0]))
        lines = [f"run folder: {folders[0]}"]
    else:
        columns = _fitting_columns(summaries, console)
        console.print(sweep_table(summaries, columns))
        left_out = [key for key in _varied_settings(summaries) if key not in columns]
        lines = ["run folders:"]
        for number, (summary, folder) in enumerate(zip(summaries, folders, strict=True)):
            settings = summary.get("overrides") or [f"{key}={summary.get(key, MISSING)}" for key in left_out]
            lines.append(" ".join([f"{number:>4} ", folder, *map(str, settings)]))
    for line in lines:  # unwrapped, however long: a path must survive being copied
        console.print(Text(line), soft_wrap=True)
