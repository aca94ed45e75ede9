"""Every column of ``metrics.jsonl``, ``layers.jsonl`` and ``summary.json``, declared once.

``python -m tagc.record.columns`` prints this page as Markdown tables. A new metric is one :class:`Column` here and the
value in the row that produces it: summary, thinned rows, tables, console line, W&B and its dashboard follow from that.
Imports neither torch nor anything of this package, so that every reader of records may use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tagc.host.pipe import closed_pipe_ends_quietly

#: statistic -> what it adds to a column's name in summary.json -> what that number is; see ``summary.summarise``
STATISTICS: dict[str, dict[str, str]] = {
    "spread": {"_median": "median", "_p20": "20th percentile", "_p80": "80th percentile"},
    "median": {"_median": "median"},
    "rate": {"_per_s": "per second: the median over the median of iteration_ms"},
    "per_step": {"_per_step": "mean"},
    "mean": {"": "mean"},
    "loss": {"": "last row's", "_last10": "mean of the last ten rows; null if one of them is not a number"},
    "last_number": {"": "last one measured"},
    "last": {"": "last row's"},
}


@dataclass(frozen=True)
class Column:
    """One column.

    unit: ``ms``, ``bytes``, ``share`` (0 to 1), ``nats``, ... or empty; it also decides how tables format the value.
    kind: the JSON type, ``int``, ``float``, ``str`` or ``bool``. when: which rows have a value, if not all have one
    (the others lack the column or hold null). summary: a key of STATISTICS, or empty: not in summary.json.
    thin: how :mod:`analysis` makes one row of several (``mean``, ``median``, ``last``), or empty: it drops the column.
    cell_decimals: decimals in the rows of ``experiments/iteration_time``; None: not kept there.
    line: value -> the column's part of a step line on the console, empty for nothing. final: row of the table at the
    end of a run, and the value's label in it where several share a row. sweep: headings in a sweep's table, one per
    number. panel: section and title of its curve on the W&B dashboard. histogram: also drawn over a step's layers.
    """

    name: str
    unit: str
    meaning: str
    kind: type = float
    when: str = ""
    summary: str = ""
    thin: str = ""
    cell_decimals: int | None = None
    line: Callable[[Any], str] | None = None
    final: tuple[str, str] | None = None
    sweep: tuple[str, ...] = ()
    panel: tuple[str, str] | None = None
    histogram: bool = False

    @property
    def summary_names(self) -> tuple[str, ...]:
        """Its names in ``summary.json``: ``iteration_ms`` with ``spread`` gives ``iteration_ms_median`` and so on."""
        return tuple(self.name + suffix for suffix in STATISTICS[self.summary]) if self.summary else ()


def format_step_time(milliseconds: float | None) -> str:
    """``1.02 s/step``, or ``87 ms/step`` below one second; empty for None."""
    if milliseconds is None:
        return ""
    return f"{milliseconds / 1e3:.2f} s/step" if milliseconds >= 1e3 else f"{milliseconds:.0f} ms/step"


def _format_loss(loss: float | None) -> str:
    return "loss not finite" if loss is None else f"loss {loss:.3f}"


_TIMES, _LOSS = "Iteration time by bandwidth", "Loss"  # sections of the dashboard
_BYTES, _LAYERS = "Bytes that a rank sends", "Sparsity per layer"
_ON_CPU = "on a CPU"
_IF_COMPRESSED = "steps in which a bucket went compressed by a method that selects"
_IF_DIAGNOSED = "every logging.fidelity_every steps"

STEP_COLUMNS: tuple[Column, ...] = (
    Column("step", "", "finished optimizer steps, from 1", int, thin="last", cell_decimals=0),
    Column(
        *("train_loss", "nats", "mean loss of the step's sequences over all ranks"),
        when="steps with a finite loss",
        summary="loss",
        thin="mean",
        cell_decimals=4,
        line=_format_loss,
        final=("train loss", ""),
        sweep=("train\nloss",),
        panel=(_LOSS, "Training loss"),
    ),
    Column(
        *("val_loss", "nats", "mean loss over the fixed validation sequences after this step"),
        when="every trainer.eval_every steps, and the last",
        summary="last_number",
        thin="last",
        line=lambda loss: "" if loss is None else f"val loss {loss:.3f}",
        final=("validation loss", ""),
        sweep=("val\nloss",),
        panel=(_LOSS, "Validation loss"),
    ),
    Column("learning_rate", "", "learning rate of the step"),
    Column("grad_norm", "", "L2 norm of the averaged gradient before clipping"),
    Column(
        *("iteration_ms", "ms", "wall time of the step on rank 0, without validation and diagnostics"),
        summary="spread",
        thin="median",
        cell_decimals=1,
        line=format_step_time,
        final=("iteration ms, median (p20-p80)", ""),
        sweep=("step\nms", "p20-p80"),
        panel=(_TIMES, "Iteration ms"),
    ),
    Column(
        *("scaled_iteration_ms", "ms", "iteration_ms over time_dilation"),
        when="steps on the link as capped",
        summary="spread",
        thin="median",
        final=("  over time dilation", ""),
    ),
    Column(
        *("time_dilation", "", "factor by which the link is slowed down, as this machine is slower than the GPU"),
        when="steps on the link as capped",
        summary="last",
        thin="last",
    ),
    Column(
        *("compute_ms", "ms", "iteration_ms less exposed_comm_ms"),
        when=_ON_CPU,
        summary="median",
        thin="median",
        cell_decimals=1,
        final=("of which ms, medians", "compute"),
        panel=(_TIMES, "Where it goes, ms"),
    ),
    Column(
        *("exposed_comm_ms", "ms", "time for which computation waited for communication"),
        when=_ON_CPU,
        summary="median",
        thin="median",
        cell_decimals=1,
        final=("of which ms, medians", "exposed communication"),
        panel=(_TIMES, "Where it goes, ms"),
    ),
    Column(
        *("encode_ms", "ms", "busy time of encoding; may overlap with computation"),
        summary="median",
        thin="median",
        cell_decimals=1,
        final=("busy ms, may overlap", "encode"),
        panel=(_TIMES, "Where it goes, ms"),
    ),
    Column(
        *("exchange_ms", "ms", "busy time of sending and receiving, gather_ms included; may overlap"),
        summary="median",
        thin="median",
        cell_decimals=1,
        final=("busy ms, may overlap", "exchange"),
        panel=(_TIMES, "Where it goes, ms"),
    ),
    Column(
        *("decode_ms", "ms", "busy time of decoding; may overlap with computation"),
        summary="median",
        thin="median",
        cell_decimals=1,
        final=("busy ms, may overlap", "decode"),
        panel=(_TIMES, "Where it goes, ms"),
    ),
    Column(
        *("gather_ms", "ms", "the part of exchange_ms that gathers parameters"),
        summary="median",
        thin="median",
        cell_decimals=1,
    ),
    Column("compute_cpu_ms", "ms", "CPU time of computing", when=_ON_CPU, summary="median", cell_decimals=1),
    Column("encode_cpu_ms", "ms", "CPU time of encoding", when=_ON_CPU, summary="median"),
    Column("decode_cpu_ms", "ms", "CPU time of decoding", when=_ON_CPU, summary="median"),
    Column("checkpoint_ms", "ms", "time for which saving a checkpoint blocked training before this step"),
    Column("tokens", "tokens", "tokens of the step, all ranks", int, summary="rate", final=("tokens per second", "")),
    Column(
        *("grad_wire_bytes", "bytes", "value_, index_ and return_wire_bytes together", int),
        summary="per_step",
        thin="mean",
        cell_decimals=0,
        final=("gradient bytes per step", ""),
        sweep=("grad\nMB",),
        panel=(_BYTES, "Gradient bytes per step"),
    ),
    Column(
        *("value_wire_bytes", "bytes", "gradient values that a rank sends to the others", int),
        summary="per_step",
        thin="mean",
        final=("  values", ""),
        panel=(_BYTES, "of which"),
    ),
    Column(
        *("index_wire_bytes", "bytes", "positions that a rank sends with them", int),
        summary="per_step",
        thin="mean",
        final=("  index", ""),
        panel=(_BYTES, "of which"),
    ),
    Column(
        *("return_wire_bytes", "bytes", "positions that were not peeled, returned to their senders", int),
        summary="per_step",
        thin="mean",
        final=("  returned", ""),
        panel=(_BYTES, "of which"),
    ),
    Column(
        *("param_wire_bytes", "bytes", "parameters that a rank sends in all-gathers", int),
        summary="per_step",
        thin="mean",
        cell_decimals=0,
        final=("parameter bytes per step", ""),
    ),
    Column(
        *("wire_bytes", "bytes", "grad_wire_bytes and param_wire_bytes together", int),
        summary="per_step",
        thin="mean",
        line=lambda count: "" if count is None else f"{count / 1e6:.1f} MB/step",
        final=("all bytes per step", ""),
        sweep=("all\nMB",),
    ),
    Column(
        *("link_sent_bytes", "bytes", "what the interface counted as sent, headers included", int),
        when="network=namespaces",
        summary="median",
        cell_decimals=0,
    ),
    Column(
        *("link_received_bytes", "bytes", "what the interface counted as received, headers included", int),
        *("network=namespaces", "median"),
    ),
    Column(
        *("achieved_sparsity", "share", "share of the elements that a rank did not select"),
        when=_IF_COMPRESSED,
        summary="mean",
        thin="mean",
        final=("sparsity", ""),
        sweep=("spar-\nsity",),
        panel=(_LAYERS, "Sparsity, union density, share peeled"),
    ),
    Column(
        *("union_density", "share", "share of the elements that any rank selected"),
        when=_IF_COMPRESSED,
        summary="mean",
        thin="mean",
        final=("union density", ""),
        sweep=("union",),
        panel=(_LAYERS, "Sparsity, union density, share peeled"),
    ),
    Column(
        *("peeled_frac", "share", "share of the selected positions whose value came back exactly from the sketch"),
        when=_IF_COMPRESSED,
        summary="mean",
        thin="mean",
        final=("peeled", ""),
        sweep=("peeled",),
        panel=(_LAYERS, "Sparsity, union density, share peeled"),
    ),
    Column("compressed_buckets", "", "buckets that went compressed", int, thin="mean", cell_decimals=0),
    Column("dense_buckets", "", "buckets that went dense", int, thin="mean", cell_decimals=0),
    Column("residual_norm", "", "L2 norm of what all ranks keep back", when="steps with a finite norm", thin="mean"),
    Column(
        *("fidelity_cosine", "", "cosine of the decoded gradient and the dense mean"),
        when=_IF_DIAGNOSED,
        summary="mean",
        thin="mean",
    ),
    Column(
        *("fidelity_rel_error", "", "L2 norm of their difference over that of the dense mean"),
        when=_IF_DIAGNOSED,
        summary="mean",
        thin="mean",
    ),
    Column("profiled", "", "the step ran under the profiler: no time of it counts", bool, when="trainer.profile=true"),
    Column("resumed", "", "the process warmed up again: no time of it counts", bool, when="after a restart"),
)

LAYER_COLUMNS: tuple[Column, ...] = (
    Column("step", "", "finished optimizer steps, from 1", int),
    Column("layer", "", "the FSDP unit's part that one compressor handles", str),
    Column("elements", "", "its elements, all shards", int),
    Column(
        *("density", "share", "share of its elements that a rank selected, mean over ranks"),
        when="methods that count it",
        panel=(_LAYERS, "Share selected, per layer"),
        histogram=True,
    ),
    Column("union_density", "share", "share of its elements that any rank selected", when="methods that select"),
    Column(
        *("threshold", "", "magnitude that a selected element had to exceed, mean over shards and ranks"),
        when="methods with a threshold",
        panel=(_LAYERS, "Threshold, per layer"),
        histogram=True,
    ),
    Column(
        *("residual_norm", "", "L2 norm of what all ranks keep back"),
        when="methods with a residual",
        panel=(_LAYERS, "Residual norm, per layer"),
        histogram=True,
    ),
    Column(
        *("ratio", "", "elements per sketch cell"),
        when="layers that went compressed by a sketch",
        panel=(_LAYERS, "Elements per sketch cell, per layer"),
    ),
    Column("went_dense", "", "whether it was sent uncompressed", bool),
    Column("peeled_frac", "share", "share of its selected positions that came back exactly", when="methods that peel"),
)

#: of summary.json, what no column of a row gives
RUN_COLUMNS: tuple[Column, ...] = (
    Column("status", "", "done, failed, interrupted", str),
    Column("error", "", "why it failed", str, when="status=failed"),
    Column("experiment", "", "the experiment's name", str),
    Column("compressor", "", "the method", str),
    Column("bandwidth", "", "the link's label", str),
    Column("rate_mbps", "Mbit/s", "the link's rate before time dilation", when="capped links"),
    Column("network", "", "how the link is capped", str),
    Column("reference_gpu", "", "GPU that time_dilation compares with", str, when="network.time_dilation=auto"),
    Column("ranks", "", "number of ranks", int),
    Column("model", "", "the model's name", str),
    Column("seed", "", "the run's seed", int),
    Column("steps", "", "finished optimizer steps", int),
    Column("missing_rows", "", "steps whose row metrics.jsonl lost", int),
    Column("timed_steps", "", "rows that count in times", int),
)

SUMMARY_COLUMNS: tuple[Column, ...] = (
    *RUN_COLUMNS,
    *(
        Column(
            name=column.name + suffix,
            unit=f"{column.unit}/s" if column.summary == "rate" else column.unit,
            meaning=f"{column.name}: {statistic}",
            kind=column.kind if column.summary in ("loss", "last_number", "last") else float,
            when="runs with such rows",
        )
        for column in STEP_COLUMNS
        if column.summary
        for suffix, statistic in STATISTICS[column.summary].items()
    ),
)

#: computed from the rows by the W&B mirror, for curves over time
WANDB_COLUMNS: tuple[Column, ...] = (Column("train_time_s", "s", "sum of iteration_ms up to this step"),)


def thinned(how: str) -> tuple[str, ...]:
    """The columns of ``metrics.jsonl`` of which a thinned row holds the ``mean``, ``median`` or ``last``."""
    return tuple(column.name for column in STEP_COLUMNS if column.thin == how)


def cell_decimals() -> dict[str, int | None]:
    """The columns that the rows of ``experiments/iteration_time`` keep -> decimals; None for whole numbers."""
    kept = (column for column in STEP_COLUMNS if column.cell_decimals is not None)
    return {column.name: None if column.kind is int else column.cell_decimals for column in kept}


def _describe_views(column: Column) -> str:
    views = {
        "summary": ", ".join(f"`{name}`" for name in column.summary_names),
        "thinned": column.thin,
        "console": "yes" if column.line else "",
        "run's table": column.final and column.final[0].strip(),
        "sweep's table": "yes" if column.sweep else "",
        "dashboard": column.panel and column.panel[1],
    }
    return "; ".join(f"{view}: {what}" for view, what in views.items() if what)


def format_table(columns: Iterable[Column]) -> str:
    """The columns as a Markdown table."""
    lines = ["| column | unit | type | meaning | which rows | shown |", "|---|---|---|---|---|---|"]
    lines += [
        f"| `{c.name}` | {c.unit} | {c.kind.__name__} | {c.meaning} | {c.when or 'all'} | {_describe_views(c)} |"
        for c in columns
    ]
    return "\n".join(lines)


def format_page() -> str:
    """All files' columns as Markdown."""
    parts = (
        ("metrics.jsonl: one row per optimizer step", STEP_COLUMNS),
        ("layers.jsonl: one row per layer, every logging.histograms_every steps", LAYER_COLUMNS),
        ("summary.json", SUMMARY_COLUMNS),
        ("Only in W&B", WANDB_COLUMNS),
    )
    return "\n\n".join(f"## {title}\n\n{format_table(columns)}" for title, columns in parts)


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.stdout.write(format_page() + "\n")
