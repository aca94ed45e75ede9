"""What compression costs in validation loss at equal steps: an arm against ``fsdp``, seed by seed, in one setting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.arms import sort_arms
from analysis.numbers.cells import spell
from analysis.numbers.stats import UNKNOWN, mean_interval
from analysis.records.identity import group_runs, loss_setting, select_newest
from analysis.records.load import Run

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
                    "sparsity": first.config.get("compressor.sparsity"),
                    "layers": first.config.get("compressor.layers"),
                }
            )
    return pd.DataFrame(lines, columns=LOSS_COLUMNS)
