"""Figures of recorded rows. Each function draws one and returns it with its name and caption; nothing is saved here.

Equal rows give equal bytes: no dates, no random ids, fonts as outlines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.arms import STYLES, VARIANT_LINES, compressor_of, sort_arms, style_of

#: of matplotlib's own settings, those that decide how a process shows figures, not how a figure looks
KEPT_SETTINGS = ("backend", "backend_fallback", "interactive", "toolbar", "webagg.")
#: complete, so that a user's matplotlibrc changes no figure
SETTINGS: Any = {
    **{key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith(KEPT_SETTINGS)},
    "svg.hashsalt": "tagc",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.formatter.useoffset": False,  # 99.99 and 100.00, not 0.00 and 0.01 above +9.999e1
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
WIDTH_CHARACTERS, SHORT_LABEL = 110, 24  # of a legend below and beside the panels


@dataclass(frozen=True)
class Drawing:
    """A figure, the stem of its files, and its caption."""

    name: str
    caption: str
    figure: Figure

    def __post_init__(self) -> None:
        """Say in a panel that nothing was drawn there."""
        for axes in self.figure.axes:
            lines = [line for line in axes.lines if line.get_transform() == axes.transData]  # not those of axhline
            if not (lines or axes.patches or axes.containers):
                axes.set_xticks([])
                axes.set_yticks([])
                axes.text(0.5, 0.5, "nothing recorded", transform=axes.transAxes, ha="center", va="center", fontsize=8)

    @matplotlib.rc_context(SETTINGS)
    def save(self, folder: Path) -> Path:
        """Write PNG, PDF and SVG; returns the SVG."""
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")  # laid out once, not once a format
        for form, metadata in METADATA.items():
            self.figure.savefig(folder / f"{self.name}.{form}", dpi=150, metadata=metadata)
        return folder / f"{self.name}.svg"

    @matplotlib.rc_context(SETTINGS)
    def _repr_png_(self) -> bytes:
        """How a notebook shows it."""
        buffer = BytesIO()
        self.figure.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def make_figure(columns: int = 1, height_in: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure of the page's width and its panels, side by side."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def draw_line(axes: Axes, x: pd.Series, y: pd.Series, arm: str, variant: int = 0, markers: int = 8) -> None:
    """A line in the arm's style; variant: number among the arms of its compressor."""
    style = style_of(arm)
    line = style.line if variant == 0 else VARIANT_LINES[variant % len(VARIANT_LINES)]
    every = max(1, len(x) // markers)
    axes.plot(x, y, color=style.colour, marker=style.marker, linestyle=line, markevery=every, label=arm)


def draw_intervals(axes: Axes, rows: pd.DataFrame, column: str, arm: str) -> None:
    """A share in per cent over ``rate_mbps``, with its interval where there is one."""
    style, middle = style_of(arm), 100 * rows[column]
    reach = [middle - 100 * rows[f"{column}_low"], 100 * rows[f"{column}_high"] - middle]
    look: Any = {"color": style.colour, "marker": style.marker, "linestyle": style.line, "label": arm}
    axes.errorbar(rows["rate_mbps"], middle, yerr=reach, capsize=2, **look)


def set_log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with a tick where something was measured."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:.4g}" for value in values])
    axes.minorticks_off()


def add_legend(figure: Figure) -> None:
    """Of all panels, beside them, or below them if labels are long; arms in their order."""
    panels = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {label: handle for found in panels for handle, label in zip(*found, strict=True)}
    is_arm = {label: compressor_of(label) in STYLES for label in handles}
    labels = [x for x in sort_arms(handles) if is_arm[x]] + [x for x in handles if not is_arm[x]]
    longest = max(map(len, labels), default=0)
    is_beside = longest <= SHORT_LABEL
    columns = 1 if is_beside else max(1, WIDTH_CHARACTERS // (longest + 8))
    place: Any = "outside right upper" if is_beside else "outside lower left"
    figure.legend([handles[label] for label in labels], labels, loc=place, ncols=columns, fontsize=8)
    if not is_beside:
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))


@matplotlib.rc_context(SETTINGS)
def draw_saving_by_rate(table: pd.DataFrame, network: str, setting: str) -> Drawing:
    """Share of ``fsdp``'s iteration time that each compressor saves, over the link's rate: zero is the crossover.

    table: lines of cells of one network and setting. Torch's own methods are left out, they would flatten the rest.
    """
    figure, (axes,) = make_figure()
    axes.axhline(0, color="black", linewidth=0.8)
    counted = table[(table["bytes_counted_by"] == "exchange") & table["rate_mbps"].notna()]
    for arm in sort_arms(counted["arm"]):
        rows = counted[counted["arm"] == arm].sort_values("rate_mbps")
        if arm != "fsdp" and rows["saved_vs_fsdp_frac"].notna().any():
            draw_intervals(axes, rows, "saved_vs_fsdp_frac", arm)
    set_log_ticks(axes, sorted(counted["rate_mbps"].unique()))
    axes.set_xlabel("link rate on this machine (Mbit/s per direction, logarithmic)")
    axes.set_ylabel("shorter iteration than fsdp (%)")
    axes.set_title(f"{setting}, {network}", loc="left", fontsize=9)
    add_legend(figure)
    caption = f"Saved iteration time by link rate, {setting} ({network}); bars: 95 % interval over blocks. Measured."
    return Drawing(f"saving_{network}_{setting}", caption, figure)


@matplotlib.rc_context(SETTINGS)
def draw_iteration_bars(table: pd.DataFrame, network: str, setting: str) -> Drawing:
    """Iteration time of each arm, a panel per link, each with its own scale."""
    cells = list(dict.fromkeys(table.sort_values("rate_mbps", na_position="last")["cell"]))
    figure, panels = make_figure(len(cells), 0.9 + 0.24 * table["arm"].nunique())
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
    figure, (axes,) = make_figure(height_in=0.9 + 0.26 * len(slowest))
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
def draw_scaling(modelled: pd.DataFrame, workload: str, rate_gbps: float) -> Drawing:
    """Modelled share of ``fsdp``'s time that each arm saves, over ranks."""
    rows = modelled[(modelled["workload"] == workload) & (modelled["rate_gbps"] == rate_gbps)]
    figure, panels = make_figure(2)
    for axes, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
        part = rows[rows["param_dtype"] == dtype].sort_values("ranks")
        axes.axhline(0, color="black", linewidth=0.8)
        for arm in sort_arms(column for column in part if column in MODELLED_ARMS):
            draw_line(axes, part["ranks"], 100 * (1 - part[arm] / part["fsdp"]), arm)
        set_log_ticks(axes, sorted(part["ranks"].unique()))
        axes.set_xlabel("ranks (logarithmic)")
        axes.set_title(f"MODELLED, {dtype} parameters", fontsize=9)
    panels[0].set_ylabel("shorter iteration than fsdp (%)")
    add_legend(figure)
    caption = f"Modelled, not measured: saved time by ranks at {rate_gbps:g} Gbit/s, {workload.replace('_', ' ')}."
    return Drawing(f"scaling_{workload}", caption, figure)


MODELLED_ARMS = ("noop", "bf16", "tagc", "tagc2", "packed", "int8")
