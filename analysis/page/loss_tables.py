"""Tables of losses: at equal steps, at equal time, and the time to equal loss by link."""

from __future__ import annotations

import pandas as pd

from analysis.numbers.cells import read_estimate
from analysis.numbers.run_times import SERIES, find_equal_loss_crossovers
from analysis.page.cell_tables import format_crossover
from analysis.page.sheet import MISSING, Sheet, format_estimate, format_number

RATE_NOTE = (
    "Sooner up to: rate above which nothing is saved, interpolated over its logarithm; `>`, `<`: beyond all rates."
)
SERIES_HEADERS = ("setting", "step times from", "network")


def make_loss_sheet(table: pd.DataFrame) -> Sheet:
    """Final validation loss and degradation at equal steps. table: from ``compare_losses``."""
    lines = [
        (
            line["setting"],
            line["arm"],
            format_number(line["val_loss"], ".4f"),
            format_number(line["val_loss_sd"] / line["val_loss"], ".2%"),
            str(line["seeds"]),
            format_degradation(line),
        )
        for _, line in table.iterrows()
    ]
    note = (
        "Validation loss after the last step, mean over seeds. Degradation: against `fsdp` of the same seed, mean and "
        "95 % interval (Student) over seeds. The noise to hold it against: how far the seeds of `fsdp` lie apart."
    )
    headers = ("setting", "arm", "val loss", "sd over seeds", "seeds", "more than fsdp (95 %)")
    return Sheet("loss", "Loss at equal steps", note, headers, lines, table)


def format_degradation(line: pd.Series, show_n: bool = False) -> str:
    """Of a line of :func:`analysis.numbers.losses.compare_losses`; ``-`` for the baseline itself."""
    if line["arm"] == "fsdp":
        return MISSING
    return format_estimate(read_estimate(line, "degradation_frac", line["pairs"]), "+.2%", show_n)


def make_equal_time_sheet(table: pd.DataFrame) -> Sheet:
    """Loss difference at equal time by link. table: of :func:`analysis.numbers.run_times.compare_at_equal_time`."""
    note = (
        "Loss against that of the baseline when the sooner of the two ends, by link rate: steps times the arm's median "
        "iteration time. Below zero: the better loss at that time. Mean over pairs of seeds, 95 % interval."
    )
    sheet = _make_link_sheet(table, "degradation_frac", "+.2%")
    return Sheet("equal_time", "Loss at equal time", note, *sheet, table)


def make_equal_loss_sheet(table: pd.DataFrame) -> Sheet:
    """Time saved to equal loss by link, and the rate up to which there is any; same table."""
    note = (
        "Less time than the baseline until both reach the worse of their two final losses, by link rate. The better of "
        "the two is then still before the end of its learning-rate schedule, and would have ended a shorter run at a "
        "lower loss: Time to equal loss, whole schedules, leaves that out. " + RATE_NOTE
    )
    return _make_saved_sheet("equal_loss", "Time to equal loss", note, table)


def make_schedule_sheet(table: pd.DataFrame) -> Sheet:
    """The same between runs at the end of their schedules. table: of ``schedules.compare_whole_schedules``."""
    note = (
        "Less time than the baseline until an arm's whole run ends at the final loss of the baseline's, by link rate. "
        "Its length follows from runs of several lengths, on a line through loss and logarithm of steps. " + RATE_NOTE
    )
    return _make_saved_sheet("equal_loss_whole", "Time to equal loss, whole schedules", note, table)


def _make_saved_sheet(name: str, title: str, note: str, table: pd.DataFrame) -> Sheet:
    headers, lines = _make_link_sheet(table, "saved_time_frac", "+.1%")
    series = [*SERIES, "arm", "baseline"]
    found = find_equal_loss_crossovers(table).set_index(series)
    groups = [names for names, _ in table.groupby(series, sort=False)]
    rates = [
        format_crossover(*found.loc[names, ["bound", "crossover_mbps"]]) if names in found.index else MISSING
        for names in groups
    ]
    lines = [(*line, rate) for line, rate in zip(lines, rates, strict=True)]
    numbers = table.merge(found.reset_index(), how="left", on=series)
    return Sheet(name, title, note, (*headers, "sooner up to, Mbit/s"), lines, numbers)


def _make_link_sheet(table: pd.DataFrame, column: str, form: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and lines: one line per series, arm and baseline, one column per link rate."""
    rates = sorted(table["rate_mbps"].unique())
    lines = []
    for (setting, times, network, _, arm, baseline), group in table.groupby([*SERIES, "arm", "baseline"], sort=False):
        by_rate = group.drop_duplicates("rate_mbps", keep="last").set_index("rate_mbps")
        shown = (
            format_estimate(read_estimate(by_rate.loc[rate], column, by_rate["pairs"][rate]), form)
            if rate in by_rate.index
            else MISSING
            for rate in rates
        )
        lines.append((setting, times, network, arm, baseline, str(group["pairs"].max()), *shown))
    headers = (*SERIES_HEADERS, "arm", "against", "seeds", *(f"{rate:.4g} Mbit/s" for rate in rates))
    return headers, lines
