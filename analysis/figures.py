"""Figures of recorded rows. Each function draws one and returns it with its name and caption; nothing is saved here.

Equal rows give equal bytes: no dates, no random ids, fonts as outlines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.arms import VARIANT_LINES, compressor_of, sort_arms, style_of

SETTINGS: Any = {
    "svg.hashsalt": "tagc",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}
#: a format's metadata that would differ from run to run
METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
WIDTH_IN = 7.2


@dataclass(frozen=True)
class Drawing:
    """A figure, the stem of its files, and its caption."""

    name: str
    caption: str
    figure: Figure

    @matplotlib.rc_context(SETTINGS)
    def save(self, folder: Path) -> Path:
        """Write PNG, PDF and SVG; returns the SVG."""
        for form, metadata in METADATA.items():
            self.figure.savefig(folder / f"{self.name}.{form}", dpi=150, metadata=metadata)
        return folder / f"{self.name}.svg"

    @matplotlib.rc_context(SETTINGS)
    def _repr_png_(self) -> bytes:
        """How a notebook shows it."""
        buffer = BytesIO()
        self.figure.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def _make_figure(columns: int = 1, height_in: float = 3.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _draw_line(axes: Axes, x: pd.Series, y: pd.Series, arm: str, variant: int = 0, markers: int = 8) -> None:
    style = style_of(arm)
    line = style.line if variant == 0 else VARIANT_LINES[variant % len(VARIANT_LINES)]
    every = max(1, len(x) // markers)
    axes.plot(x, y, color=style.colour, marker=style.marker, linestyle=line, markevery=every, label=arm)


def _set_log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with a tick where something was measured."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:.4g}" for value in values])
    axes.minorticks_off()


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)


@matplotlib.rc_context(SETTINGS)
def draw_saving_by_rate(table: pd.DataFrame, network: str, setting: str) -> Drawing:
    """Share of ``fsdp``'s iteration time that each compressor saves, over the link's rate: zero is the crossover.

    table: lines of cells of one network and setting. Torch's own methods are left out, they would flatten the rest.
    """
    figure, (axes,) = _make_figure()
    axes.axhline(0, color="black", linewidth=0.8)
    counted = table[(table["bytes_counted_by"] == "exchange") & table["rate_mbps"].notna()]
    for arm in sort_arms(counted["arm"]):
        rows = counted[counted["arm"] == arm].sort_values("rate_mbps")
        if arm == "fsdp" or rows["saved_vs_fsdp_frac"].isna().all():
            continue
        style, middle = style_of(arm), 100 * rows["saved_vs_fsdp_frac"]
        reach = [middle - 100 * rows["saved_vs_fsdp_frac_low"], 100 * rows["saved_vs_fsdp_frac_high"] - middle]
        axes.errorbar(
            rows["rate_mbps"],
            middle,
            yerr=reach,
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            capsize=2,
            label=arm,
        )
    _set_log_ticks(axes, sorted(counted["rate_mbps"].unique()))
    axes.set_xlabel("link rate on this machine (Mbit/s per direction, logarithmic)")
    axes.set_ylabel("shorter iteration than fsdp (%)")
    axes.set_title(f"{setting}, {network}", loc="left", fontsize=9)
    _add_legend(figure, axes)
    caption = f"Saved iteration time by link rate, {setting} ({network}); bars: 95 % interval over blocks. Measured."
    return Drawing(f"saving_{network}_{setting}", caption, figure)


@matplotlib.rc_context(SETTINGS)
def draw_iteration_bars(table: pd.DataFrame, network: str, setting: str) -> Drawing:
    """Iteration time of each arm, a panel per link, each with its own scale."""
    cells = list(dict.fromkeys(table.sort_values("rate_mbps", na_position="last")["cell"]))
    figure, panels = _make_figure(len(cells), 0.9 + 0.24 * table["arm"].nunique())
    arms = sort_arms(table["arm"])
    for axes, cell in zip(panels, cells, strict=True):
        rows = table[table["cell"] == cell].set_index("arm").reindex(arms)
        low = rows["iteration_ms"] - rows["iteration_ms_p20"]
        high = rows["iteration_ms_p80"] - rows["iteration_ms"]
        for i, arm in enumerate(arms):
            style, time = style_of(arm), rows["iteration_ms"][arm]
            axes.barh(i, time, color="white", edgecolor=style.colour, hatch=style.hatch, xerr=[[low[arm]], [high[arm]]])
        rate = rows["rate_mbps"].dropna()
        axes.set_title(f"{rate.iloc[0]:.4g} Mbit/s" if len(rate) else "no cap", fontsize=8)
        axes.set_yticks(range(len(arms)), arms if axes is panels[0] else [""] * len(arms))
        axes.set_xlabel("ms per step")
        axes.set_ylim(len(arms) - 0.5, -0.5)
    caption = f"Iteration time by link, {setting} ({network}): median, bars from the 20th to the 80th percentile."
    return Drawing(f"iteration_{network}_{setting}", caption, figure)


@matplotlib.rc_context(SETTINGS)
def draw_gradient_bars(table: pd.DataFrame, network: str, setting: str) -> Drawing:
    """Busy time of gradient communication, encode and decode beside the exchange, at the setting's slowest link."""
    counted = table[table["gradient_comm_ms"].notna() & table["rate_mbps"].notna()]
    slowest = counted[counted["rate_mbps"] == counted["rate_mbps"].min()].set_index("arm")
    figure, (axes,) = _make_figure(height_in=0.9 + 0.26 * len(slowest))
    arms = sort_arms(slowest.index)
    codec = slowest["encode_ms"] + slowest["decode_ms"]
    for i, arm in enumerate(arms):
        style, moving = style_of(arm), slowest["gradient_comm_ms"][arm] - codec[arm]
        axes.barh(i, moving, color="white", edgecolor=style.colour, hatch=style.hatch)
        axes.barh(i, codec[arm], left=moving, color=style.colour, edgecolor="black")
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel("gradient communication (ms per step): exchange hatched, encode + decode filled")
    caption = f"Gradient communication at the slowest link of {setting} ({network}), busy time, median of steps."
    return Drawing(f"gradient_{network}_{setting}", caption, figure)


@matplotlib.rc_context(SETTINGS)
def draw_bytes(numbers: pd.DataFrame, setting: str, index: int) -> Drawing:
    """Bytes per step by kind, stacked. numbers: of :func:`analysis.run_tables.make_bytes_sheet`, one setting."""
    figure, (axes,) = _make_figure(height_in=0.9 + 0.26 * len(numbers))
    kinds = {
        "param": ("", "#cccccc"),
        "value": ("//", "#0072b2"),
        "index": ("xx", "#d55e00"),
        "return": ("..", "#009e73"),
    }
    left = pd.Series(0.0, index=numbers.index)
    for kind, (hatch, colour) in kinds.items():
        width = numbers[f"{kind}_wire_bytes"].fillna(0) / 1e6
        axes.barh(numbers["arm"], width, left=left, color="white", edgecolor=colour, hatch=hatch, label=kind)
        left += width
    axes.invert_yaxis()
    axes.set_xlim(0, 1.03 * left.max())
    axes.set_xlabel("sent by one rank per step (MB)")
    _add_legend(figure, axes)
    return Drawing(f"bytes_{index}", f"Bytes by kind, {setting}.", figure)


@matplotlib.rc_context(SETTINGS)
def draw_curves(frame: pd.DataFrame, setting: str, index: int) -> Drawing:
    """Validation loss over steps and time, a line per arm, where all its seeds have one.

    frame: arm, seed, step, time_s, val_loss.
    """
    figure, (by_step, by_time) = _make_figure(2)
    groups = frame.dropna(subset="val_loss").groupby(["arm", "step"])
    means = groups[["time_s", "val_loss"]].mean().assign(seeds=groups.size()).reset_index()
    means = means[means["seeds"] == means["arm"].map(frame.groupby("arm")["seed"].nunique())]
    for arm, variant in _number_variants(means["arm"]):
        rows = means[means["arm"] == arm]
        _draw_line(by_step, rows["step"], rows["val_loss"], arm, variant)
        if rows["time_s"].notna().any():
            _draw_line(by_time, rows["time_s"], rows["val_loss"], arm, variant)
    by_step.set_xlabel("optimizer step")
    by_time.set_xlabel("steps x median iteration time (s)")
    by_step.set_ylabel("validation loss (nats per token)")
    _add_legend(figure, by_step)
    caption = f"Validation loss over steps and over time (over time dilation, if any), mean of seeds, {setting}."
    return Drawing(f"loss_{index}", caption, figure)


SHARES = {"achieved_sparsity": "sparsity", "union_density": "union density", "peeled_frac": "peeled"}


@matplotlib.rc_context(SETTINGS)
def draw_shares(frame: pd.DataFrame, setting: str, index: int) -> Drawing:
    """Sparsity, union density and peeled share over training. frame: arm, step and the columns of ``SHARES``."""
    figure, panels = _make_figure(len(SHARES), 2.8)
    means = frame.groupby(["arm", "step"], as_index=False)[list(SHARES)].mean()
    for axes, (column, label) in zip(panels, SHARES.items(), strict=True):
        for arm, variant in _number_variants(means["arm"]):
            rows = means[(means["arm"] == arm) & means[column].notna()]
            if len(rows):
                _draw_line(axes, rows["step"], 100 * rows[column], arm, variant, markers=5)
        low, high = axes.get_ylim()
        axes.set_ylim(max(0, low), min(101, high))  # a share that is always 100 % would get a scale beyond it
        axes.set_xlabel("optimizer step")
        axes.set_title(f"{label} (%)", fontsize=9)
    _add_legend(figure, panels[0] if panels[0].lines else panels[-1])
    return Drawing(f"shares_{index}", f"Sparsity, union density and peeled share over training, {setting}.", figure)


@matplotlib.rc_context(SETTINGS)
def draw_scaling(modelled: pd.DataFrame, workload: str, rate_gbps: float) -> Drawing:
    """Modelled share of ``fsdp``'s time that each arm saves, over ranks."""
    rows = modelled[(modelled["workload"] == workload) & (modelled["rate_gbps"] == rate_gbps)]
    figure, panels = _make_figure(2)
    for axes, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
        part = rows[rows["param_dtype"] == dtype].sort_values("ranks")
        axes.axhline(0, color="black", linewidth=0.8)
        for arm in sort_arms(column for column in part if column in MODELLED_ARMS):
            _draw_line(axes, part["ranks"], 100 * (1 - part[arm] / part["fsdp"]), arm)
        _set_log_ticks(axes, sorted(part["ranks"].unique()))
        axes.set_xlabel("ranks (logarithmic)")
        axes.set_title(f"MODELLED, {dtype} parameters", fontsize=9)
    panels[0].set_ylabel("shorter iteration than fsdp (%)")
    _add_legend(figure, panels[0])
    caption = f"Modelled, not measured: saved time by ranks at {rate_gbps:g} Gbit/s, {workload.replace('_', ' ')}."
    return Drawing(f"scaling_{workload}", caption, figure)


MODELLED_ARMS = ("noop", "bf16", "tagc", "tagc2", "packed", "int8")


def _number_variants(arms: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Every arm with its number among those of its compressor, which decides its line."""
    seen: dict[str, int] = {}
    for arm in sort_arms(arms):
        name = compressor_of(arm)
        seen[name] = seen.get(name, -1) + 1
        yield arm, seen[name]
