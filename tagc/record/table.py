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
from tagc.record.console import get_console

MISSING = "-"
SETTINGS = ("compressor", "bandwidth", "network", "ranks", "seed", "model")
HEADERS = {"compressor": "com-\npressor", "bandwidth": "band-\nwidth"}  # no wider than their values
Summary = dict[str, Any]


def _format(value: Any, form: Callable[[Any], str]) -> str:
    return MISSING if value is None else form(value)


def _bytes(value: Any) -> str:
    return _format(value, lambda count: decimal(round(count)))


def _percent(value: Any) -> str:
    return _format(value, lambda share: f"{share:.1%}")


def _loss(value: Any) -> str:
    return _format(value, lambda loss: f"{loss:.3f}")


def _milliseconds(value: Any) -> str:
    return _format(value, lambda ms: f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}")


def _median(summary: Summary) -> str:
    return _milliseconds(summary.get("iteration_ms_median"))


def _spread(summary: Summary, key: str = "iteration_ms") -> str:
    """20th and 80th percentile of the iteration time, in ms."""
    if summary.get(f"{key}_p20") is None:
        return MISSING
    return f"{_milliseconds(summary[f'{key}_p20'])}-{_milliseconds(summary.get(f'{key}_p80'))}"


def _scaled(summary: Summary) -> str:
    """Iteration time over time dilation; only where there is one."""
    if summary.get("time_dilation") in (None, 1):
        return MISSING
    key = "scaled_iteration_ms"
    return f"{_milliseconds(summary.get(f'{key}_median'))} ({_spread(summary, key)})"


def _megabytes(kind: str) -> Callable[[Summary], str]:
    def form(count: float) -> str:
        return f"{count / 1e6:.2f}" if count < 1e7 else f"{count / 1e6:.0f}"

    return lambda summary: _format(summary.get(f"{kind}wire_bytes_per_step"), form)


def _wire(kind: str) -> Callable[[Summary], str]:
    return lambda summary: _bytes(summary.get(f"{kind}wire_bytes_per_step"))


def _link(summary: Summary) -> str:
    rate_mbps, dilation = summary.get("rate_mbps"), summary.get("time_dilation", 1)
    name = str(summary.get("bandwidth", MISSING))
    if rate_mbps is None:
        return name
    if dilation is None:  # the run ended before it was known
        return f"{name}: not capped yet, {summary.get('network', MISSING)}"
    dilated = f" (time dilation {dilation:.4g})" if dilation != 1 else ""
    return f"{name}: {format_rate(rate_mbps / dilation)}{dilated}, {summary.get('network', MISSING)}"


def _phases(summary: Summary) -> str:
    names = {"compute": "compute", "exposed_comm": "exposed communication"}
    return "  ".join(f"{label} {_milliseconds(summary.get(f'{name}_ms_median'))}" for name, label in names.items())


def _busy(summary: Summary) -> str:
    names = ("encode", "exchange", "decode")
    return "  ".join(f"{name} {_milliseconds(summary.get(f'{name}_ms_median'))}" for name in names)


def _losses(summary: Summary) -> str:
    return f"{_loss(summary.get('train_loss'))} (last 10: {_loss(summary.get('train_loss_last10'))})"


ONE_RUN: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("status", lambda s: str(s.get("status", MISSING))),
    ("error", lambda s: str(s.get("error", MISSING))),
    ("run", lambda s: f"{s.get('model', MISSING)}, {s.get('ranks', MISSING)} ranks, seed {s.get('seed', MISSING)}"),
    ("compressor", lambda s: str(s.get("compressor", MISSING))),
    ("bandwidth", _link),
    ("steps (timed)", lambda s: f"{s.get('steps', MISSING)} ({s.get('timed_steps', MISSING)})"),
    ("iteration ms, median (p20-p80)", lambda s: f"{_median(s)} ({_spread(s)})"),
    ("  over time dilation", _scaled),
    ("of which ms, medians", _phases),
    ("busy ms, may overlap", _busy),
    ("tokens per second", lambda s: _format(s.get("tokens_per_s"), lambda rate: f"{rate:,.0f}")),
    ("gradient bytes per step", _wire("grad_")),
    ("  values", _wire("value_")),
    ("  index", _wire("index_")),
    ("  returned", _wire("return_")),
    ("parameter bytes per step", _wire("param_")),
    ("all bytes per step", _wire("")),
    ("train loss", _losses),
    ("validation loss", lambda s: _loss(s.get("val_loss"))),
    ("sparsity", lambda s: _percent(s.get("achieved_sparsity"))),
    ("union density", lambda s: _percent(s.get("union_density"))),
    ("peeled", lambda s: _percent(s.get("peeled_frac"))),
)

MANY_RUNS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("step\nms", _median),
    ("p20-p80", _spread),
    ("grad\nMB", _megabytes("grad_")),
    ("all\nMB", _megabytes("")),
    ("train\nloss", lambda s: _loss(s.get("train_loss"))),
    ("val\nloss", lambda s: _loss(s.get("val_loss"))),
    ("spar-\nsity", lambda s: _percent(s.get("achieved_sparsity"))),
    ("union", lambda s: _percent(s.get("union_density"))),
    ("peeled", lambda s: _percent(s.get("peeled_frac"))),
)


def final_table(summary: Summary) -> Table:
    """One run as two columns, name and value. Times are measured; bytes are those one step moves."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in ONE_RUN:
        if name != "error" or "error" in summary:
            table.add_row(Text(name), Text(value(summary)))
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
    for name, _ in MANY_RUNS:
        table.add_column(name, justify="right", no_wrap=True)
    for number, summary in enumerate(summaries):
        settings = [Text(str(summary.get(key, MISSING))) for key in columns]
        table.add_row(str(number), *settings, *(Text(value(summary)) for _, value in MANY_RUNS))
    return table


def _fitting_columns(summaries: Sequence[Summary], console: Console) -> list[str]:
    """As many of the varied settings as fit beside the numbers; the rest is told in the lines below the table."""
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
