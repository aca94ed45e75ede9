"""Time to equal loss between runs that each followed their own learning-rate schedule to its end.

A run that is compared before its end still has a high learning rate, and so a higher loss than a shorter run would have
ended at. Where an arm was run to several lengths, its final loss is known as a function of the length; the length at
which it ends at the baseline's loss, times its step time, is what the baseline's run is held against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.arms import sort_arms
from analysis.numbers.cells import BASELINES, spell
from analysis.numbers.run_times import SERIES, Key, list_step_times
from analysis.numbers.stats import UNKNOWN, mean_interval
from analysis.records.cells import Cell
from analysis.records.identity import Setting, group_runs, loss_setting, sort_by_start
from analysis.records.load import Run

Ends = Mapping[int, float]  # final loss by number of steps
SLACK_FRAC = 0.1  # a loss may lie this share of their span outside those that the lengths gave


def steps_to_loss(ends: Ends, target: float) -> float:
    """Length of the run that would end at this loss: a line through (loss, log steps) of runs of several lengths.

    ends: final loss by number of steps. NaN with less than two lengths, or for a loss that they do not enclose.

    >>> round(steps_to_loss({100: 5.0, 400: 4.0}, 4.5))
    200
    """
    losses = np.array(list(ends.values()))
    if len(ends) < 2 or not np.isfinite(losses).all():
        return math.nan
    slack = SLACK_FRAC * (losses.max() - losses.min())
    if not losses.min() - slack <= target <= losses.max() + slack:
        return math.nan
    slope, start = np.polyfit(losses, np.log(list(ends)), 1)
    return float(np.exp(start + slope * target))


def any_length(run: Run) -> Setting:
    """The setting of the losses without the number of steps."""
    return loss_setting(run) | {"trainer.max_steps": "any number of"}


def list_ends(runs: Sequence[Run]) -> dict[Key, dict[int, float]]:
    """Final loss by number of steps, for every arm and seed; of a repetition the newest."""
    ends: dict[Key, dict[int, float]] = {}
    for run in sort_by_start(runs):
        ends.setdefault((run.arm, run.config["seed"]), {})[run.config["trainer.max_steps"]] = run.final_loss
    return ends


def save_shares(mine: Sequence[Ends], base: Sequence[Ends], run_ms: float, base_ms: float) -> list[float]:
    """Per seed the share of the baseline's time that is saved until its final loss.

    For its longest run of all seeds whose loss the arm's lengths enclose for every seed, so that one mean is of one
    thing; NaN for all if there is none.
    """
    lengths = sorted(set.intersection(*map(set, mine)))
    curves = [{steps: ends[steps] for steps in lengths} for ends in mine]
    for steps in sorted(set.intersection(*map(set, base)), reverse=True):
        needed = [steps_to_loss(curve, ends[steps]) for curve, ends in zip(curves, base, strict=True)]
        if np.isfinite(needed).all():
            return [1 - each * run_ms / (steps * base_ms) for each in needed]
    return [math.nan] * len(curves)


def compare_whole_schedules(runs: Sequence[Run], cells: Sequence[Cell]) -> pd.DataFrame:
    """One line per setting, measured link, baseline and arm that was run to several lengths; intervals over seeds.

    The saved share is NaN where no length of the arm came near the baseline's loss.
    """
    lines = []
    for setting, members in group_runs([run for run in runs if run.is_done], any_length).items():
        ends = list_ends(members)
        for timed in list_step_times(members, cells):
            place = {"setting": setting, "times": timed.times, "network": timed.network, "machine": timed.machine}
            for arm in sort_arms({arm for arm, _ in timed.runs}):
                for baseline in BASELINES:
                    seeds = [s for name, s in sorted(timed.runs) if name == arm != baseline]
                    seeds = [s for s in seeds if (baseline, s) in timed.runs and len(ends[arm, s]) > 1]
                    mine, base = ([ends[name, seed] for seed in seeds] for name in (arm, baseline))
                    if not seeds or len(set.intersection(*map(set, mine))) < 2:
                        continue
                    ms = (timed.step_ms[name, seeds[0]] for name in (arm, baseline))
                    shares = save_shares(mine, base, *ms)
                    saved = mean_interval(shares) if np.isfinite(shares).all() else UNKNOWN
                    line = place | {"rate_mbps": timed.rate_mbps, "arm": arm, "baseline": baseline}
                    lines.append(line | {"pairs": len(seeds)} | spell("saved_time_frac", saved))
    names = [f"saved_time_frac{end}" for end in ("", "_low", "_high")]
    return pd.DataFrame(lines, columns=[*SERIES, "rate_mbps", "arm", "baseline", "pairs", *names])
