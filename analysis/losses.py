"""What compression costs in validation loss: at equal steps, at equal time, and how soon it reaches the same loss.

An arm is compared with ``fsdp`` seed by seed, in runs of the same setting. Time is a step's median time times the
steps: the run's own, or that of the same arm in a cell of ``experiments/iteration_time``, where arms took turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.arms import sort_arms
from analysis.cells import Cell, spell, summarise_cell
from analysis.identity import group_runs, label_arm, loss_setting, select_newest, time_setting
from analysis.load import Run
from analysis.stats import UNKNOWN, Estimate, mean_interval

BASELINE = "fsdp"
LOSS_COLUMNS = [
    "setting",
    "arm",
    "seeds",
    "val_loss",
    "val_loss_sd",
    "pairs",
    "degradation_frac",
    "degradation_frac_low",
    "degradation_frac_high",
    "sparsity",
    "layers",
]


def compare_losses(runs: Sequence[Run]) -> pd.DataFrame:
    """One line per setting and arm: mean final validation loss over seeds, and degradation against ``fsdp``.

    Degradation: per seed ``arm / fsdp - 1``, then mean and Student's interval over the ``pairs`` of seeds. Unfinished
    runs and other settings never meet; a repeated seed counts once; a seed without a final loss leaves no mean.
    """
    lines = []
    for setting, members in group_runs([run for run in runs if run.is_done], loss_setting).items():
        newest = select_newest(members)
        for arm in sort_arms(arm for arm, _ in newest):
            mine = {seed: run for (name, seed), run in newest.items() if name == arm}
            losses = np.array([run.final_loss for _, run in sorted(mine.items())])
            ratios = [
                run.final_loss / newest[BASELINE, seed].final_loss - 1
                for seed, run in sorted(mine.items())
                if (BASELINE, seed) in newest
            ]
            has_all = np.isfinite(ratios).all()  # a mean over the seeds that did not diverge would flatter
            estimate = mean_interval(ratios) if has_all else UNKNOWN._replace(n=len(ratios))
            first = next(iter(mine.values()))
            lines.append(
                {
                    "setting": setting,
                    "arm": arm,
                    "seeds": len(losses),
                    "val_loss": losses.mean(),
                    "val_loss_sd": losses.std(ddof=1) if len(losses) > 1 else math.nan,
                    "pairs": estimate.n,
                    **spell("degradation_frac", estimate),
                    "sparsity": first.config["compressor.sparsity"],
                    "layers": first.config["compressor.layers"],
                }
            )
    return pd.DataFrame(lines, columns=LOSS_COLUMNS)


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
    return all(settings.get(f"fsdp.{key}") == run.config[key] for key in keys)


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

    Both learning rates follow their schedule to the end only in the sooner run, so equal time flatters it a little.
    """
    (steps, losses), (base_steps, base_losses) = (one.val_curve.to_numpy(dtype=float).T for one in (run, baseline))
    end_ms = min(steps[-1] * run_ms, base_steps[-1] * baseline_ms)
    mine, base = np.interp(end_ms / run_ms, steps, losses), np.interp(end_ms / baseline_ms, base_steps, base_losses)
    target = max(losses[-1], base_losses[-1])
    mine_s = time_to_loss(steps, losses, run_ms, target)
    base_s = time_to_loss(base_steps, base_losses, baseline_ms, target)
    return {"degradation_frac": mine / base - 1, "saved_time_frac": 1 - mine_s / base_s}


def compare_at_equal_time(runs: Sequence[Run], cells: Sequence[Cell]) -> pd.DataFrame:
    """One line per setting, source of the step times and arm, against ``fsdp`` and against ``bf16``.

    Own times are used for runs with a capped link on one machine; cells, where one timed this very step and arm.
    """
    done = [run for run in runs if run.is_done and len(run.val_curve)]
    lines: list[dict[str, Any]] = []
    capped = [run for run in done if run.config.get("bandwidth.rate_mbps") is not None]
    for setting, members in group_runs(capped, time_setting).items():
        times = {key: own_step_ms(run) for key, run in select_newest(members).items()}
        lines += _pair_up(setting, "own steps, one run after another", members, times)
    arm_times = [summarise_cell(cell).set_index("arm")["scaled_iteration_ms"] for cell in cells] if done else []
    for setting, members in group_runs(done, loss_setting).items():
        newest = select_newest(members)
        for cell, arm_ms in zip(cells, arm_times, strict=True):
            fitting = {key: run for key, run in newest.items() if key[0] in arm_ms and fits_cell(run, cell)}
            times = {key: float(arm_ms[key[0]]) for key in fitting}
            source = f"cell {cell.shared['cell']['key']} ({cell.shared['cell']['network']})"
            lines += _pair_up(setting, source, list(fitting.values()), times)
    columns = ["setting", "times", "arm", "baseline", "pairs"]
    names = [f"{name}{end}" for name in ("degradation_frac", "saved_time_frac") for end in ("", "_low", "_high")]
    return pd.DataFrame(lines, columns=[*columns, *names])


def _pair_up(
    setting: str, source: str, runs: Sequence[Run], step_ms: Mapping[tuple[str, int], float]
) -> list[dict[str, Any]]:
    newest, lines = select_newest(runs), []
    for arm in sort_arms(label_arm(run) for run in runs):
        for baseline in (BASELINE, "bf16"):
            pairs = [
                compare_pair(run, newest[baseline, seed], step_ms[arm, seed], step_ms[baseline, seed])
                for (name, seed), run in sorted(newest.items())
                if name == arm != baseline and (baseline, seed) in newest
            ]
            if pairs:
                found = {name: mean_interval([pair[name] for pair in pairs]) for name in pairs[0]}
                spelled = {
                    key: value for name, estimate in found.items() for key, value in spell(name, estimate).items()
                }
                names = {"setting": setting, "times": source, "arm": arm, "baseline": baseline, "pairs": len(pairs)}
                lines.append(names | spelled)
    return lines


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
            for baseline in (BASELINE, "bf16"):
                shares = [
                    1 - own_step_ms(run) / own_step_ms(newest[baseline, seed])
                    for seed, run in mine.items()
                    if (baseline, seed) in newest
                ]
                line |= spell(f"saved_vs_{baseline}_frac", mean_interval(shares))
                line[f"pairs_{baseline}"] = len(shares)
            lines.append(line)
    return pd.DataFrame(lines)


def seed_noise(table: pd.DataFrame) -> Estimate:
    """Standard deviation over seeds of the baseline's final loss, as a share of it, by setting with most seeds."""
    dense = table[(table["arm"] == BASELINE) & table["val_loss_sd"].notna()].sort_values("seeds")
    if not len(dense):
        return UNKNOWN
    best = dense.iloc[-1]
    return Estimate(int(best["seeds"]), best["val_loss_sd"] / best["val_loss"], math.nan, math.nan)
