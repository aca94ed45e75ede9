"""The project's answer from recorded rows: three sentences, one small table, one figure for the front page.

Rows are methods, columns are links. What is shown is chosen by rule: the setting measured at most links, its lowest,
middle and highest link rate, and the loss setting with most pairs of seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import pandas as pd

from analysis.arms import compressor_of, sort_arms, style_of
from analysis.numbers.cells import find_crossovers, read_estimate
from analysis.numbers.stats import Estimate
from analysis.page.claims import list_verdicts
from analysis.page.figures import SETTINGS, Drawing, make_figure, set_log_ticks
from analysis.page.loss_tables import format_degradation
from analysis.page.sheet import MISSING, Sheet, format_range

CEILING, BASELINE, RIVAL = "noop", "fsdp", "bf16"
OWN_AIM = "aim of this project"
LABEL_GAP_FRAC = 0.045  # of the figure's height, between two labels at the lines' ends


def pick_setting(table: pd.DataFrame) -> pd.DataFrame:
    """Lines of the network and setting that were measured at most links: first in the rows' order if several."""
    links = table.groupby(["network", "machine", "setting"], sort=False)["cell"].nunique()
    network, machine, setting = links.idxmax()
    is_it = (table["network"] == network) & (table["machine"] == machine) & (table["setting"] == setting)
    return table[is_it]


def is_own_setting(arms: pd.Series) -> pd.Series:
    """Which arms are compressors with the settings of their option in conf/."""
    return arms.map(compressor_of) == arms


def pick_losses(losses: pd.DataFrame) -> pd.DataFrame:
    """Lines of the loss setting with most pairs of seeds, by arm; only the compressors' own settings."""
    own = losses[is_own_setting(losses["arm"]) & (losses["arm"] != BASELINE)]
    if not len(own):
        return own.set_index("arm", drop=False)
    setting = own.groupby("setting", sort=False)["pairs"].sum().idxmax()
    return own[own["setting"] == setting].set_index("arm", drop=False)


def pick_rates(rates: Sequence[float]) -> list[float]:
    """The lowest, the middle and the highest of the ascending link rates.

    >>> pick_rates([93.0, 200.0, 1000.0, 4000.0])
    [93.0, 1000.0, 4000.0]
    """
    return sorted({rates[0], rates[len(rates) // 2], rates[-1]})


def select_answer(table: pd.DataFrame) -> pd.DataFrame:
    """The picked setting's lines at capped links of methods whose bytes this project's exchange counts."""
    mine = pick_setting(table)
    return mine[(mine["bytes_counted_by"] == "exchange") & mine["rate_mbps"].notna()]


def make_answer_sheet(table: pd.DataFrame, losses: pd.DataFrame) -> Sheet:
    """Method by link: how much shorter its iterations are than those of ``fsdp``; and its cost in loss with n.

    table: of :func:`select_answer`; losses: of :func:`analysis.numbers.losses.compare_losses`.
    """
    rates, costs = pick_rates(sorted(table["rate_mbps"].unique())), pick_losses(losses)
    lines = []
    for arm in sort_arms(table["arm"]):
        mine = table[table["arm"] == arm].drop_duplicates("rate_mbps").set_index("rate_mbps")
        shown = (_format_saving(arm, mine.loc[rate]) if rate in mine.index else MISSING for rate in rates)
        cost = format_degradation(costs.loc[arm], show_n=True) if arm in costs.index else MISSING
        lines.append((f"`{arm}`", *shown, cost))
    first = table.iloc[0]
    note = (
        f"Iterations shorter than those of `{BASELINE}` by link rate, median of {format_range(table['blocks'])} paired "
        f"blocks ({first['setting']}, {first['machine']}); validation loss above that of `{BASELINE}`, mean and 95 % "
        f"interval over n seeds. `{CEILING}` sends no gradients: the ceiling."
    )
    headers = ("compressor", *(f"{rate:.5g} Mbit/s" for rate in rates), "loss cost")
    return Sheet("answer", "The answer", note, headers, lines)


def _format_saving(arm: str, line: pd.Series) -> str:
    return f"{line['iteration_ms']:.0f} ms" if arm == BASELINE else f"{line[f'saved_vs_{BASELINE}_frac']:+.1%}"


def tell_time(table: pd.DataFrame) -> str:
    """One sentence: which method wins at which link, and up to which link rate each pays.

    A method wins if no other saves more and the interval of its saving lies above zero.
    """
    methods = table[~table["arm"].isin([CEILING, BASELINE])]
    winners: list[tuple[str, list[float], list[Estimate]]] = []
    for rate, group in methods.groupby("rate_mbps"):
        best = group.loc[group[f"saved_vs_{BASELINE}_frac"].idxmax()]
        saving = read_estimate(best, f"saved_vs_{BASELINE}_frac")
        winner = best["arm"] if saving.low > 0 else ""
        if winners and winners[-1][0] == winner:
            winners[-1][1].append(rate)
            winners[-1][2].append(saving)
        else:
            winners.append((winner, [rate], [saving]))
    parts = [_tell_winner(*each) for each in winners]
    crossovers = find_crossovers(table, (BASELINE, RIVAL)).set_index(["arm", "baseline"])
    for arm in ("tagc", "tagc2"):
        if (arm, BASELINE) in crossovers.index and (arm, RIVAL) in crossovers.index:
            pays, beats = crossovers.loc[(arm, BASELINE)], crossovers.loc[(arm, RIVAL)]
            parts.append(f"`{arm}` is {_tell_limit(pays, BASELINE)} and {_tell_limit(beats, RIVAL)}")
    return f"Time: {'; '.join(parts)}."


def _tell_winner(winner: str, rates: list[float], savings: list[Estimate]) -> str:
    where = f"at {rates[0]:.0f}{f' to {rates[-1]:.0f}' if len(rates) > 1 else ''} Mbit/s"
    if not winner:
        return f"{where} no method is faster than `{BASELINE}` beyond its 95 % interval"
    shares = [saving.middle for saving in savings]
    least = f"{min(shares):.0%} to " if f"{min(shares):.0%}" != f"{max(shares):.0%}" else ""
    return f"{where} `{winner}` wins, with iterations {least}{max(shares):.0%} shorter than those of `{BASELINE}`"


def _tell_limit(crossover: pd.Series, baseline: str) -> str:
    if crossover["bound"] == "below":
        return f"at no measured link faster than `{baseline}`"
    over = "over " if crossover["bound"] == "above" else ""
    return f"faster than `{baseline}` up to {over}{crossover['crossover_mbps']:.0f} Mbit/s"


def tell_loss(table: pd.DataFrame, losses: pd.DataFrame) -> str:
    """One sentence: what each method costs in loss at equal steps; empty without losses."""
    costs = pick_losses(losses)
    arms = [arm for arm in sort_arms(costs.index) if arm in set(table["arm"]) - {CEILING, BASELINE}]
    known = [arm for arm in arms if not pd.isna(costs["degradation_frac"][arm])]
    if not known:
        return ""
    shown = [f"`{arm}` {costs['degradation_frac'][arm]:+.1%} (n = {costs['pairs'][arm]})" for arm in known]
    return f"Loss: validation loss against `{BASELINE}` ({costs['setting'].iloc[0]}): {', '.join(shown)}."


def tell_claims(table: pd.DataFrame, losses: pd.DataFrame) -> str:
    """One sentence: how many of the papers' claims reproduce here, and which."""
    verdicts = [each for each in list_verdicts(table, losses, False) if each.paper != OWN_AIM]
    count = {name: sum(each.verdict == name for each in verdicts) for name in ("partly", "not", "not measured")}
    done = [f"{each.claim} ({each.paper})" for each in verdicts if each.verdict == "reproduced"]
    rest = ", ".join(
        f"{n} {text}"
        for n, text in (
            (count["partly"], "reproduce in part"),
            (count["not"], "do not"),
            (count["not measured"], "could not be measured here"),
        )
        if n
    )
    which = f": {'; '.join(done)}" if done else ""
    return (
        f"Claims: of the papers' {len(verdicts)} claims {len(done)} reproduce{'s' * (len(done) == 1)}{which}; {rest}."
    )


@matplotlib.rc_context(SETTINGS)
def draw_answer(table: pd.DataFrame) -> Drawing:
    """Iteration time by link rate, ``fsdp`` at 100, a line per method, named at its left end.

    table: of :func:`select_answer`. Marker and line tell the methods apart without colour.
    """
    figure, (axes,) = make_figure(height_in=3.6)
    rates = sorted(table["rate_mbps"].unique())
    ends = {}
    for arm in sort_arms(table["arm"]):
        rows, style = table[table["arm"] == arm].sort_values("rate_mbps"), style_of(arm)
        percent = 100 * (1 - rows[f"saved_vs_{BASELINE}_frac"])
        axes.plot(rows["rate_mbps"], percent, color=style.colour, marker=style.marker, linestyle=style.line, label=arm)
        ends[arm] = (rows["rate_mbps"].iloc[0], percent.iloc[0])
    set_log_ticks(axes, rates)
    axes.set_xlim(rates[0] * (rates[0] / rates[-1]) ** 0.18, rates[-1] * 1.1)
    low, high = axes.get_ylim()
    places = spread_labels({arm: y for arm, (_, y) in ends.items()}, LABEL_GAP_FRAC * (high - low))
    for arm, (x, y) in ends.items():
        at = (x * (rates[0] / rates[-1]) ** 0.04, places[arm])
        line = {"arrowstyle": "-", "color": style_of(arm).colour, "linewidth": 0.6}
        axes.annotate(arm, (x, y), at, ha="right", va="center", fontsize=8, color="black", arrowprops=line)
    axes.set_xlabel("link rate (Mbit/s per direction, logarithmic)")
    axes.set_ylabel("time per step (fsdp = 100)")
    first = table.iloc[0]
    caption = f"Time per step by link rate, {first['setting']} on {first['machine']} ({first['network']}). Measured."
    return Drawing("answer", caption, figure)


def spread_labels(places: dict[str, float], gap: float) -> dict[str, float]:
    """The places moved up, in their order, until neighbours are ``gap`` apart.

    >>> spread_labels({"b": 1.5, "a": 1.0, "c": 9.0}, 1.0)
    {'a': 1.0, 'b': 2.0, 'c': 9.0}
    """
    moved: dict[str, float] = {}
    last = float("-inf")
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        last = moved[name] = max(place, last + gap)
    return moved
