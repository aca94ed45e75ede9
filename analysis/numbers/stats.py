"""Statistics of measured numbers. Every result says how many values it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

RESAMPLES = 10_000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A middle with the bounds of its interval at ``LEVEL``, from ``n`` values. NaN: not measured, or n too small."""

    n: int
    middle: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether there is an interval to judge by."""
        return not math.isnan(self.low)


UNKNOWN = Estimate(0, math.nan, math.nan, math.nan)


class Spread(NamedTuple):
    """Median with 20th and 80th percentile of ``n`` values."""

    n: int
    median: float
    p20: float
    p80: float


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """Percentiles of the finite values; NaN if there are none.

    >>> spread([10, 20, 30])
    Spread(n=3, median=20.0, p20=14.0, p80=26.0)
    """
    kept = _finite(values)
    if not len(kept):
        return Spread(0, math.nan, math.nan, math.nan)
    p20, median, p80 = np.percentile(kept, (20, 50, 80))
    return Spread(len(kept), float(median), float(p20), float(p80))


def bootstrap_median(values: Sequence[float] | np.ndarray, seed: int = 0) -> Estimate:
    """Median with its percentile bootstrap interval (Efron & Tibshirani, 1993, ch. 13); NaN bounds for one value.

    >>> bootstrap_median([2.0, 2.0])
    Estimate(n=2, middle=2.0, low=2.0, high=2.0)
    """
    kept = _finite(values)
    if len(kept) < 2:
        return Estimate(len(kept), float(kept[0]) if len(kept) else math.nan, math.nan, math.nan)
    picks = np.random.default_rng(seed).integers(len(kept), size=(RESAMPLES, len(kept)))
    low, high = np.quantile(np.median(kept[picks], axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(len(kept), float(np.median(kept)), float(low), float(high))


def mean_interval(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean with Student's interval, for as few values as there are seeds; NaN bounds for one value.

    Three values are too few to resample: a bootstrap interval of them holds the mean about 3 times in 4.

    >>> [round(number, 3) for number in mean_interval([1.0, 2.0, 3.0])]
    [3, 2.0, -0.484, 4.484]
    """
    kept = _finite(values)
    if len(kept) < 2:
        return Estimate(len(kept), float(kept[0]) if len(kept) else math.nan, math.nan, math.nan)
    middle = float(kept.mean())
    reach = float(stdtrit(len(kept) - 1, (1 + LEVEL) / 2) * kept.std(ddof=1) / math.sqrt(len(kept)))
    return Estimate(len(kept), middle, middle - reach, middle + reach)


def paired_saving(blocks: pd.DataFrame, arm: str, baseline: str) -> Estimate:
    """Share of the baseline's time that the arm saves, ``1 - arm / baseline`` block by block: median and interval.

    blocks: times by block (index) and arm (columns). Blocks that lack one of the two are left out.
    """
    if arm not in blocks or baseline not in blocks:
        return UNKNOWN
    return bootstrap_median((1 - blocks[arm] / blocks[baseline]).to_numpy(dtype=float))


def cross_zero(rates: np.ndarray, saved: np.ndarray) -> tuple[float, str]:
    """Where ``saved`` falls to zero, coming from the lowest of the ascending ``rates``.

    Between two rates it is interpolated over the rate's logarithm ("interpolated"); "above" / "below" all of them, the
    rate is the last / first.

    >>> cross_zero(np.array([10.0, 1000.0]), np.array([0.1, -0.1]))
    (100.0, 'interpolated')
    """
    lost = np.flatnonzero(saved <= 0)
    if not len(lost):
        return float(rates[-1]), "above"
    i = int(lost[0])
    if i == 0:
        return float(rates[0]), "below"
    share = saved[i - 1] / (saved[i - 1] - saved[i])
    return float(rates[i - 1] * (rates[i] / rates[i - 1]) ** share), "interpolated"


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    return array[np.isfinite(array)]
