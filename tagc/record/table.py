"""The table at the end of a run or a sweep; readable in a pipe of 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tagc.record.console import get_console

MISSING = "-"
SETTINGS = ("model", "ranks", "bandwidth", "compressor", "seed")
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
    return _format(value, lambda ms: f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}")


def _iteration(summary: Summary) -> str:
    """Median with the 20th and 80th percentile, in ms."""
    if summary.get("iteration_ms_median") is None:
        return MISSING
    low, high = _milliseconds(summary.get("iteration_ms_p20")), _milliseconds(summary.get("iteration_ms_p80"))
    return f"{_milliseconds(summary['iteration_ms_median'])} ({low}-{high})"


def _wire(kind: str) -> Callable[[Summary], str]:
    return lambda summary: _bytes(summary.get(f"{kind}wire_bytes_per_step"))


def _phases(summary: Summary) -> str:
    names = ("compute", "encode", "exchange", "decode")
    return "  ".join(f"{name} {_milliseconds(summary.get(f'{name}_ms_median'))}" for name in names)


def _losses(summary: Summary) -> str:
    return f"{_loss(summary.get('train_loss'))} (last 10: {_loss(summary.get('train_loss_last10'))})"


ONE_RUN: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("status", lambda s: str(s.get("status", MISSING))),
    ("error", lambda s: str(s.get("error", MISSING))),
    ("run", lambda s: f"{s.get('model', MISSING)}, {s.get('ranks', MISSING)} ranks, seed {s.get('seed', MISSING)}"),
    ("compressor", lambda s: str(s.get("compressor", MISSING))),
    ("bandwidth", lambda s: str(s.get("bandwidth", MISSING))),
    ("steps (timed)", lambda s: f"{s.get('steps', MISSING)} ({s.get('timed_steps', MISSING)})"),
    ("iteration ms, median (p20-p80)", _iteration),
    ("of which ms, medians", _phases),
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
    ("ms per step\n(p20-p80)", _iteration),
    ("gradient\nper step", _wire("grad_")),
    ("all bytes\nper step", _wire("")),
    ("train\nloss", lambda s: _loss(s.get("train_loss"))),
    ("val\nloss", lambda s: _loss(s.get("val_loss"))),
    ("spar-\nsity", lambda s: _percent(s.get("achieved_sparsity"))),
    ("union", lambda s: _percent(s.get("union_density"))),
    ("peeled", lambda s: _percent(s.get("peeled_frac"))),
)


def _folder(text: str) -> Text:
    """A path in one piece, however narrow the console: it must survive being copied."""
    return Text(text, no_wrap=True, overflow="ignore")


def final_table(summary: Summary) -> RenderableType:
    """One run as two columns, name and value. Times are measured; bytes are those one step moves."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in ONE_RUN:
        if name != "error" or "error" in summary:
            table.add_row(Text(name), Text(value(summary)))
    return Group(table, _folder(f"run folder: {summary.get('run_dir', MISSING)}"))


def sweep_table(summaries: Sequence[Summary]) -> RenderableType:
    """Several runs, a row each. A setting that all runs share moves to the title; the folders follow below."""
    varied = [key for key in SETTINGS if len({summary.get(key) for summary in summaries}) > 1]
    shared = [f"{key} {summaries[0].get(key)}" for key in SETTINGS if key not in varied]
    if any(summary.get("status") != "done" for summary in summaries):
        varied.append("status")
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title=", ".join(shared), title_justify="left")
    table.add_column("run", justify="right")
    for key in varied:
        table.add_column(key, overflow="fold")
    for name, _ in MANY_RUNS:
        table.add_column(name, justify="right", overflow="fold")
    for number, summary in enumerate(summaries):
        settings = [Text(str(summary.get(key, MISSING))) for key in varied]
        table.add_row(str(number), *settings, *(Text(value(summary)) for _, value in MANY_RUNS))
    folders = [_folder(f"{number}  {summary.get('run_dir', MISSING)}") for number, summary in enumerate(summaries)]
    return Group(table, Text("run folders"), *folders)


def print_table(summaries: Sequence[Summary], console: Console | None = None) -> None:
    """Print the end of a run (one summary) or of a sweep (several) to stdout."""
    if not summaries:
        return
    renderable = final_table(summaries[0]) if len(summaries) == 1 else sweep_table(summaries)
    (console or get_console()).print(renderable)
