"""Figures of runs: losses over steps, time and links, bytes by kind, shares over training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import matplotlib
import pandas as pd

from analysis.arms import compressor_of, sort_arms, style_of
from analysis.numbers.cells import BASELINES
from analysis.page.claims import LEAST_N
from analysis.page.figures import SETTINGS, Drawing, add_legend, draw_intervals, draw_line, make_figure, set_log_ticks

LEAST_SPAN = 1.0  # of a scale of shares, in percentage points
MOST_LINES = 10  # that one can tell apart


def pick_arms(arms: Iterable[str]) -> list[str]:
    """All arms if their lines can be told apart, else the compressors' own settings, else the first ones.

    >>> pick_arms(["fsdp", "tagc2", *(f"tagc2 sparsity=0.{i}" for i in range(10))])
    ['fsdp', 'tagc2']
    """
    chosen = sort_arms(arms)
    if len(chosen) > MOST_LINES:
        chosen = [arm for arm in chosen if arm == compressor_of(arm)] or chosen
    return chosen[:MOST_LINES]


def _tell_left_out(arms: Iterable[str]) -> str:
    count = len(set(arms)) - len(pick_arms(arms))
    return f" {count} further settings are in the table." if count else ""


@matplotlib.rc_context(SETTINGS)
def draw_degradation(table: pd.DataFrame, index: int) -> Drawing:
    """Degradation of every arm with its interval; the band is how far the seeds of ``fsdp`` lie apart.

    table: of :func:`analysis.numbers.losses.compare_losses`, one setting.
    """
    setting, rows = table["setting"].iloc[0], table[(table["arm"] != "fsdp") & table["degradation_frac"].notna()]
    figure, (axes,) = make_figure(height_in=1.0 + 0.22 * len(rows))
    noise = table[table["arm"] == "fsdp"].eval("100 * val_loss_sd / val_loss")
    if noise.notna().any():
        reach = float(noise.iloc[0])
        axes.axvspan(-reach, reach, color="#dddddd")
    axes.axvline(0, color="black", linewidth=0.8)
    for i, (_, line) in enumerate(rows.iterrows()):
        style, middle = style_of(line["arm"]), 100 * line["degradation_frac"]
        is_judged = line["pairs"] >= LEAST_N  # an interval of two is so wide that it would flatten all others
        bar = 100 * line["degradation_frac_high"] - middle if is_judged else None
        face = style.colour if is_judged else "white"
        axes.errorbar(middle, i, xerr=bar, capsize=3, color=style.colour, marker=style.marker, markerfacecolor=face)
    axes.set_yticks(range(len(rows)), rows["arm"] + " (" + rows["pairs"].astype(str) + ")")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("validation loss above that of fsdp (%)")
    caption = (
        f"Degradation at equal steps, {setting}: mean and 95 % interval over the pairs of seeds in brackets; hollow: "
        f"fewer than {LEAST_N}. Grey: the standard deviation over the seeds of fsdp, both ways."
    )
    return Drawing(f"degradation_{index}", caption, figure)


@matplotlib.rc_context(SETTINGS)
def draw_equal_loss(table: pd.DataFrame, name: str, index: int) -> Drawing:
    """Time saved to equal loss over the link's rate, against each baseline: zero is where it stops to pay.

    table: of ``compare_at_equal_time`` or ``compare_whole_schedules``, one series of links; name: of its sheet.
    """
    figure, panels = make_figure(2)
    for axes, baseline in zip(panels, BASELINES, strict=True):
        rows = table[(table["baseline"] == baseline) & table["saved_time_frac"].notna()]
        axes.axhline(0, color="black", linewidth=0.8)
        for arm in pick_arms(rows["arm"]):
            draw_intervals(axes, rows[rows["arm"] == arm].sort_values("rate_mbps"), "saved_time_frac", arm)
        set_log_ticks(axes, sorted(table["rate_mbps"].unique()))
        axes.set_xlabel("link rate (Mbit/s, logarithmic)")
        axes.set_title(f"against {baseline}", fontsize=9)
    panels[0].set_ylabel("less time to equal loss (%)")
    add_legend(figure)
    first = table.iloc[0]
    caption = (
        f"Time saved to equal loss by link rate, table {name}, {first['setting']}; step times: {first['times']} "
        f"({first['network']}); bars: 95 % interval over seeds.{_tell_left_out(table['arm'])}"
    )
    return Drawing(f"{name}_{index}", caption, figure)


@matplotlib.rc_context(SETTINGS)
def draw_bytes(numbers: pd.DataFrame, setting: str, index: int) -> Drawing:
    """Bytes per step by kind, stacked. numbers: of :func:`analysis.page.run_tables.make_bytes_sheet`, one setting."""
    figure, (axes,) = make_figure(height_in=0.9 + 0.26 * len(numbers))
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
    add_legend(figure)
    return Drawing(f"bytes_{index}", f"Bytes by kind, {setting}.", figure)


@matplotlib.rc_context(SETTINGS)
def draw_curves(frame: pd.DataFrame, setting: str, times: str, index: int) -> Drawing:
    """Validation loss over steps and time, and how far above ``fsdp``; a line per arm, where all its seeds have one.

    frame: arm, seed, step, time_s, val_loss; times: where the step times come from.
    """
    figure, (by_step, by_time, above) = make_figure(3, 3.0)
    known = frame.dropna(subset="val_loss")
    dense = known[known["arm"] == "fsdp"].set_index(["seed", "step"])["val_loss"].rename("dense_loss")
    known = known.join(dense, on=["seed", "step"]).eval("above = 100 * (val_loss / dense_loss - 1)")
    groups = known.groupby(["arm", "step"])
    means = groups[["time_s", "val_loss", "above"]].mean().assign(seeds=groups.size()).reset_index()
    means = means[means["seeds"] == means["arm"].map(frame.groupby("arm")["seed"].nunique())]
    panels = {"val_loss": (by_step, "step"), "time_s": (by_time, "time_s"), "above": (above, "step")}
    for arm, variant in _number_variants(pick_arms(means["arm"])):
        rows = means[means["arm"] == arm]
        for column, (axes, x) in panels.items():
            if rows[column].notna().any():
                y = "val_loss" if column == "time_s" else column
                draw_line(axes, rows[x], rows[y], arm, variant)
    for axes, label, title in (
        (by_step, "optimizer step", "validation loss (nats)"),
        (by_time, "time (s)", "validation loss (nats)"),
        (above, "optimizer step", "above fsdp (%)"),
    ):
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=9)
    add_legend(figure)
    caption = (
        f"Validation loss over steps, over time, and above that of fsdp with the same seed, mean of seeds, {setting}. "
        f"Time: steps x median iteration time, {times}.{_tell_left_out(means['arm'])}"
    )
    return Drawing(f"loss_{index}", caption, figure)


SHARES = {"achieved_sparsity": "sparsity", "union_density": "union density", "peeled_frac": "peeled"}


@matplotlib.rc_context(SETTINGS)
def draw_shares(frame: pd.DataFrame, setting: str, index: int) -> Drawing:
    """Sparsity, union density and peeled share over training. frame: arm, step and the columns of ``SHARES``."""
    figure, panels = make_figure(len(SHARES), 2.8)
    means = frame.groupby(["arm", "step"], as_index=False)[list(SHARES)].mean().dropna(subset=list(SHARES), how="all")
    arms = pick_arms(means["arm"])
    for axes, (column, label) in zip(panels, SHARES.items(), strict=True):
        for arm, variant in _number_variants(arms):
            rows = means[(means["arm"] == arm) & means[column].notna()]
            if len(rows):
                draw_line(axes, rows["step"], 100 * rows[column], arm, variant, markers=5)
        low, high = axes.get_ylim()
        widen = max(0.0, LEAST_SPAN - (high - low)) / 2  # a share that hardly changes is no curve
        axes.set_ylim(max(0, low - widen), min(101, high + widen))  # nor does a scale end beyond 100 %
        axes.set_xlabel("optimizer step")
        axes.set_title(f"{label} (%)", fontsize=9)
    add_legend(figure)
    caption = f"Sparsity, union density and peeled share over training, {setting}.{_tell_left_out(means['arm'])}"
    return Drawing(f"shares_{index}", caption, figure)


def _number_variants(arms: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Every arm with its number among those of its compressor, which decides its line."""
    seen: dict[str, int] = {}
    for arm in sort_arms(arms):
        name = compressor_of(arm)
        seen[name] = seen.get(name, -1) + 1
        yield arm, seen[name]
