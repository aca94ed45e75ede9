"""Time of runs, and what compression costs or saves when time is counted: loss at equal time, time to equal loss.

Time is a step's median time times the steps: the run's own, or that of the same arm in a cell of
``experiments/iteration_time``, where arms took turns under a capped link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.arms import sort_arms
from analysis.numbers.cells import BASELINES, find_zeros, select_timed, spell
from analysis.numbers.stats import UNKNOWN, mean_interval
from analysis.records.cells import Cell, describe_machine
from analysis.records.identity import describe_differences, group_runs, loss_setting, select_newest, time_setting
from analysis.records.load import Run

LINK_KEYS = ("bandwidth.rate_mbps", "network.time_dilation")
#: what tells one measured link of a setting from the same link elsewhere
SERIES = ["setting", "times", "network", "machine"]
PAIR_COLUMNS = ("degradation_frac", "saved_time_frac")
Key = tuple[str, int]  # arm, seed


class StepTimes(NamedTuple):
    """Step times of a setting's runs at one link: which runs have one, and where it was measured."""

    times: str
    network: str
    machine: str
    rate_mbps: float
    runs: dict[Key, Run]
    step_ms: dict[Key, float]


def own_step_ms(run: Run) -> float:
    """The run's median iteration time, over its time dilation where it has one; NaN if no step was timed."""
    value = run.summary.get("scaled_iteration_ms_median") or run.summary.get("iteration_ms_median")
    return math.nan if value is None else float(value)


def fits_cell(run: Run, cell: Cell) -> bool:
    """Whether the cell timed the very step that the run makes: model, data, batch, ranks, dtypes, resharding."""
    settings = cell.shared["settings"]
    keys = [key for key in run.config if key.startswith("model.")]
    keys += ["data.name", "data.vocab_size", "cluster.ranks"]
    keys += [f"trainer.{key}" for key in ("global_batch", "micro_batch", "param_dtype", "reshard_after_forward")]
    return all(settings.get(f"fsdp.{key}") == run.config.get(key) for key in keys)


def time_to_loss(steps: np.ndarray, losses: np.ndarray, step_ms: float, target: float) -> float:
    """Seconds until the validation loss first is ``target``, linear between validations; NaN if it never is.

    >>> time_to_loss(np.array([10, 20]), np.array([6.0, 4.0]), 1000.0, 5.0)
    15.0
    """
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return math.nan
    i = int(reached[0])
    if i == 0:
        return float(steps[0] * step_ms / 1e3)
    share = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
    return float((steps[i - 1] + share * (steps[i] - steps[i - 1])) * step_ms / 1e3)


def compare_pair(run: Run, baseline: Run, run_ms: float, baseline_ms: float) -> dict[str, float]:
    """Two runs at their step times: degradation when the sooner one ends, and time saved to the worse final loss.

    The one that is then still on its way has a higher learning rate, so a higher loss than at the end of a schedule of
    that length: the loss at equal time flatters the sooner run, the time to equal loss the better one (schedules.py).
    """
    (steps, losses), (base_steps, base_losses) = (one.val_curve.to_numpy(dtype=float).T for one in (run, baseline))
    end_ms = min(steps[-1] * run_ms, base_steps[-1] * baseline_ms)
    mine, base = np.interp(end_ms / run_ms, steps, losses), np.interp(end_ms / baseline_ms, base_steps, base_losses)
    if math.isnan(run.final_loss + baseline.final_loss):
        return dict.fromkeys(PAIR_COLUMNS, math.nan)  # a curve that ends early would be compared where it still is
    target = max(losses[-1], base_losses[-1])
    mine_s = time_to_loss(steps, losses, run_ms, target)
    base_s = time_to_loss(base_steps, base_losses, baseline_ms, target)
    return {"degradation_frac": mine / base - 1, "saved_time_frac": 1 - mine_s / base_s}


def list_step_times(runs: Sequence[Run], cells: Sequence[Cell]) -> Iterator[StepTimes]:
    """Every link at which the steps of these runs, all of one setting of the losses, were timed.

    Cells count where one timed this very step and arm; own times for runs with a capped link on one machine.
    """
    newest = select_newest(runs)
    for cell in cells:
        fitting = {key: run for key, run in newest.items() if key[0] in cell.shared["cell"]["arms"]}
        fitting = {key: run for key, run in fitting.items() if fits_cell(run, cell)}
        if fitting and cell.shared["link"]["rate_mbps"] is not None:
            arm_ms = select_timed(cell.rows).groupby("arm")["iteration_ms"].median()
            times = {key: float(arm_ms[key[0]]) / cell.shared["link"]["time_dilation"] for key in fitting}
            place = (cell.shared["setting"], cell.shared["cell"]["network"], cell.machine)
            yield StepTimes(f"cells {place[0]}", *place[1:], cell.shared["link"]["rate_mbps"], fitting, times)
    capped = [run for run in runs if run.config.get("bandwidth.rate_mbps") is not None]
    groups = list(group_runs(capped, time_setting).values())
    settings = [time_setting(members[0]) for members in groups]
    differing = describe_differences([{k: v for k, v in each.items() if k not in LINK_KEYS} for each in settings])
    for members, setting, difference in zip(groups, settings, differing, strict=True):
        mine = select_newest(members)
        times = {key: own_step_ms(run) for key, run in mine.items()}
        name = ", ".join(["own, one run after another", *difference])
        machine = describe_machine(members[0].manifest.get("hardware", {}))
        yield StepTimes(name, str(setting["network"]), machine, setting["bandwidth.rate_mbps"], mine, times)


def compare_at_equal_time(runs: Sequence[Run], cells: Sequence[Cell]) -> pd.DataFrame:
    """One line per setting, measured link and arm, against ``fsdp`` and against ``bf16``; intervals over seeds."""
    lines = []
    done = [run for run in runs if run.is_done and len(run.val_curve)]
    for setting, members in group_runs(done, loss_setting).items():
        for timed in list_step_times(members, cells):
            place = {"setting": setting, "times": timed.times, "network": timed.network, "machine": timed.machine}
            lines += [place | {"rate_mbps": timed.rate_mbps} | line for line in _pair_up(timed.runs, timed.step_ms)]
    names = [f"{name}{end}" for name in PAIR_COLUMNS for end in ("", "_low", "_high")]
    return pd.DataFrame(lines, columns=[*SERIES, "rate_mbps", "arm", "baseline", "pairs", *names])


def _pair_up(runs: Mapping[Key, Run], step_ms: Mapping[Key, float]) -> Iterator[dict[str, Any]]:
    for arm in sort_arms(arm for arm, _ in runs):
        for baseline in BASELINES:
            pairs = [
                compare_pair(run, runs[baseline, seed], step_ms[arm, seed], step_ms[baseline, seed])
                for (name, seed), run in sorted(runs.items())
                if name == arm != baseline and (baseline, seed) in runs
            ]
            if pairs:
                line: dict[str, Any] = {"arm": arm, "baseline": baseline, "pairs": len(pairs)}
                for name in PAIR_COLUMNS:
                    values = [pair[name] for pair in pairs]  # a mean over seeds that did not diverge would flatter
                    line |= spell(name, mean_interval(values) if np.isfinite(values).all() else UNKNOWN)
                yield line


def find_equal_loss_crossovers(table: pd.DataFrame) -> pd.DataFrame:
    """For every series of links, arm and baseline the rate above which the arm no longer reaches equal loss sooner.

    table: of :func:`compare_at_equal_time`. Interpolated as the crossovers of iteration times are.
    """
    return find_zeros(table, [*SERIES, "arm", "baseline"], "saved_time_frac")


def compare_run_times(runs: Sequence[Run]) -> pd.DataFrame:
    """Iteration times of run folders: one line per setting of machine and link, and arm.

    Paired by seed, as runs of one seed usually followed each other; a single seed gives no interval.
    """
    lines = []
    timed = [run for run in runs if run.is_done and not math.isnan(own_step_ms(run))]
    for setting, members in group_runs(timed, time_setting).items():
        newest = select_newest(members)
        for arm in sort_arms(arm for arm, _ in newest):
            mine = {seed: run for (name, seed), run in newest.items() if name == arm}
            rows = [run.summary for run in mine.values()]
            line: dict[str, Any] = {"setting": setting, "arm": arm, "runs": len(rows)}
            line["rate_mbps"] = members[0].config.get("bandwidth.rate_mbps")
            for key in ("timed_steps", "iteration_ms_median", "iteration_ms_p20", "iteration_ms_p80", "time_dilation"):
                line[key] = float(np.median([row.get(key) or math.nan for row in rows]))
            for baseline in BASELINES:
                shares = [
                    1 - own_step_ms(run) / own_step_ms(newest[baseline, seed])
                    for seed, run in mine.items()
                    if (baseline, seed) in newest
                ]
                line |= spell(f"saved_vs_{baseline}_frac", mean_interval(shares))
                line[f"pairs_{baseline}"] = len(shares)
            lines.append(line)
    return pd.DataFrame(lines)
