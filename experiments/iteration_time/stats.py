"""From recorded rows to the numbers of the table. Pure functions of frames.

Times are medians over timed steps: those of the blocks, less the first of every turn. Comparisons are paired: within a
block, the median of an arm against the median of the baseline, since both met the same state of the machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from experiments.iteration_time.arms import OTHER_TRANSPORT
from tagc.network.link import WIRE_BYTES_PER_BYTE

BASELINES = ("fsdp", "bf16")
RESAMPLES = 10_000
LEVEL = 0.95


def select_timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that count."""
    return rows[(rows["phase"] == "blocks") & (rows["turn_step"] > 0)]


def pair_blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """Median iteration time in ms by block (index) and arm (column)."""
    return select_timed(rows).groupby(["block", "arm"])["iteration_ms"].median().unstack("arm")


def bootstrap_median(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Median with the bounds of its percentile bootstrap interval at ``LEVEL`` (Efron & Tibshirani, 1993, ch. 13).

    Example: values that are all 2 give (2, 2, 2).
    """
    picks = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[picks], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(np.median(values)), float(low), float(high)


def saved_time(blocks: pd.DataFrame, arm: str, baseline: str) -> tuple[float, float, float]:
    """Share of the baseline's iteration time that the arm saves, ``1 - arm / baseline``: median, low, high.

    NaN where one of the two was not measured.
    """
    if arm not in blocks or baseline not in blocks:
        return math.nan, math.nan, math.nan
    return bootstrap_median((1 - blocks[arm] / blocks[baseline]).to_numpy())


def _sent_bytes(timed: pd.DataFrame, is_counted: bool) -> float:
    """Per step: counted by the exchange or, where torch communicates, by the interface (headers included)."""
    if is_counted:
        return (timed["grad_wire_bytes"] + timed["param_wire_bytes"]).mean()
    return timed["link_sent_bytes"].mean()


def _dense_share(timed: pd.DataFrame) -> float:
    """Share of the buckets that the policy selected and that travelled dense all the same."""
    buckets = timed["dense_buckets"] + timed["compressed_buckets"]
    return (timed["dense_buckets"] / buckets.where(buckets > 0)).mean()


def summarise_arm(shared: dict[str, Any], rows: pd.DataFrame, arm: str, blocks: pd.DataFrame) -> dict[str, Any]:
    """One line of the table."""
    cell, link = shared["cell"], shared["link"]
    timed = select_timed(rows)
    mine, baseline = timed[timed["arm"] == arm], timed[timed["arm"] == "fsdp"]
    p20, p50, p80 = np.percentile(mine["iteration_ms"], (20, 50, 80))
    is_counted = arm not in OTHER_TRANSPORT
    nbytes, baseline_bytes = _sent_bytes(mine, is_counted), _sent_bytes(baseline, is_counted)
    line = {
        "network": cell["network"],
        "cell": cell["key"],
        "setting": shared["setting"],
        "rate_mbps": link["rate_mbps"],
        "time_dilation": link["time_dilation"],
        "arm": arm,
        "steps": len(mine),
        "iteration_ms": p50,
        "iteration_ms_p20": p20,
        "iteration_ms_p80": p80,
        "scaled_iteration_ms": p50 / link["time_dilation"],
        "sent_bytes": nbytes,
        "link_sent_bytes": mine["link_sent_bytes"].mean(),
        "saved_bytes_frac": 1 - nbytes / baseline_bytes,
        "allowed_frac": _allowed_frac(shared, mine, arm),
        "dense_frac": _dense_share(mine),
    }
    for name in BASELINES:
        for suffix, value in zip(("", "_low", "_high"), saved_time(blocks, arm, name), strict=True):
            line[f"saved_vs_{name}_frac{suffix}"] = value
    line["realised_frac"] = _realised_frac(line, blocks, baseline_bytes)
    for column in ("compute_ms", "exposed_comm_ms", "encode_ms", "decode_ms"):
        line[column] = mine[column].median()
    return line


def _allowed_frac(shared: dict[str, Any], mine: pd.DataFrame, arm: str) -> float:
    """Closed form: the share of ``fsdp``'s bytes that the arm's gradients do without. NaN where torch communicates."""
    expected = shared["expected_gradient_bytes"]
    if expected.get(arm) is None:
        return math.nan
    return (expected["fsdp"] - expected[arm]) / (expected["fsdp"] + mine["param_wire_bytes"].mean())


def _realised_frac(line: dict[str, Any], blocks: pd.DataFrame, baseline_bytes: float) -> float:
    """Saved time over the time that the link needs for the saved bytes; NaN without a cap or without saved bytes.

    Headers count. Example: 1 MB less on a link of 1.046 MB/s and 0.9 s less per step: 0.9.
    """
    saved_bytes = baseline_bytes - line["sent_bytes"]
    if line["rate_mbps"] is None or line["arm"] in OTHER_TRANSPORT or saved_bytes < 0.001 * baseline_bytes:
        return math.nan
    saved_ms = (blocks["fsdp"] - blocks[line["arm"]]).median()
    return saved_ms / (saved_bytes * WIRE_BYTES_PER_BYTE * 8 / line["rate_mbps"] / 1e3)


def summarise_cell(shared: dict[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    """All lines of one cell, arms in the plan's order."""
    blocks = pair_blocks(rows)
    return pd.DataFrame([summarise_arm(shared, rows, arm, blocks) for arm in shared["cell"]["arms"]])


def find_crossovers(table: pd.DataFrame, baselines: tuple[str, ...] = BASELINES) -> pd.DataFrame:
    """For every setting, arm and baseline the link rate above which the arm is no longer faster.

    Between measured rates the saved share is interpolated over the logarithm of the rate. ``bound`` is "interpolated",
    or "above" / "below" the rates that were measured (``crossover_mbps`` is then the last of them).
    """
    capped = table[table["rate_mbps"].notna() & ~table["arm"].isin([*OTHER_TRANSPORT, "noop", "fsdp"])]
    found = []
    for (network, setting, arm), group in capped.groupby(["network", "setting", "arm"], sort=False):
        for baseline in baselines:
            points = group[["rate_mbps", f"saved_vs_{baseline}_frac"]].dropna().sort_values("rate_mbps").to_numpy()
            if arm == baseline or len(points) < 2:
                continue
            rate, bound = _cross_zero(points[:, 0], points[:, 1])
            names = {"network": network, "setting": setting, "arm": arm, "baseline": baseline}
            found.append({**names, "crossover_mbps": rate, "bound": bound})
    return pd.DataFrame(found)


def _cross_zero(rates: np.ndarray, saved: np.ndarray) -> tuple[float, str]:
    """Where ``saved`` falls to zero, coming from the lowest of the ascending ``rates``."""
    lost = np.flatnonzero(saved <= 0)
    if not len(lost):
        return float(rates[-1]), "above"
    i = int(lost[0])
    if i == 0:
        return float(rates[0]), "below"
    share = saved[i - 1] / (saved[i - 1] - saved[i])
    return float(rates[i - 1] * (rates[i] / rates[i - 1]) ** share), "interpolated"
