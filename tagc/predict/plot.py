"""Modelled time of an iteration against the bandwidth, with the bandwidths up to which methods beat ``fsdp``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path

from tagc.errors import UserError
from tagc.network.link import format_rate
from tagc.predict.answer import BASELINE, Plan, find_last

LINES, MARKERS = ("-", "--", "-.", ":"), "osD^v<>PX*hpd"
DECADES = 3  # of bandwidth
SMALLEST_GAIN = 0.01  # that counts as faster; below it lie ripples of the schedule


def draw(path: Path, plans: Sequence[Plan]) -> None:
    """Write the figure, in the format that the file's name ends in. The asked bandwidth is a vertical line.

    Errors: ``UserError`` if matplotlib is not installed, does not know the format or cannot write the file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--plot {path} needs matplotlib: pip install 'tagc[analysis]'") from None
    question = plans[0].question
    centre = min(max(question.rate_mbps, 100.0), 1e5)
    rates = [centre * 10**-1.5 * 10 ** (i / 4) for i in range(4 * DECADES + 1)]  # find_last's, so that all are cached
    predict_ms = cache(Plan.predict_ms)
    baseline = next(plan for plan in plans if plan.method == BASELINE)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for plan, line, marker in zip(plans, cycle(LINES), cycle(MARKERS), strict=False):
        label = plan.method
        if plan.method != BASELINE:

            def wins(rate: float, plan: Plan = plan) -> bool:
                return predict_ms(plan, rate) < (1 - SMALLEST_GAIN) * predict_ms(baseline, rate)

            last = find_last(wins, rates[0], DECADES)
            if last is not None and math.isfinite(last):
                label += f" (faster up to {format_rate(last)})"
                axes.plot([last], [predict_ms(plan, last)], marker="o", markersize=11, fillstyle="none", color="black")
            else:
                label += " (nowhere faster)" if last is None else " (faster throughout)"
        axes.plot(
            rates, [predict_ms(plan, rate) for rate in rates], linestyle=line, marker=marker, markersize=4, label=label
        )
    if math.isfinite(question.rate_mbps):
        axes.axvline(question.rate_mbps, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of a node's link", ylabel="ms per iteration, modelled")
    axes.set_title(
        f"{question.model.name}, {question.ranks} ranks, {question.gpu}, {question.dtype}: MODELLED. "
        f"Rings: up to where a method beats {BASELINE} by {SMALLEST_GAIN:.0%}",
        fontsize=9,
    )
    axes.legend(fontsize=7)
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise UserError(f"--plot {path}: {error}") from None
