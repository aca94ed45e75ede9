"""Numbers of a cell: one line per arm, and up to which link rate an arm pays.

Times are medians over timed steps: those of the blocks, less the first of every turn. Comparisons are paired: within a
block, the median of an arm against the median of the baseline, since both met the same state of the machine.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from analysis.numbers.stats import Estimate, bootstrap_median, cross_zero, paired_saving, spread
from analysis.records.cells import Cell
from tagc.network.link import WIRE_BYTES_PER_BYTE

BASELINES = ("fsdp", "bf16")


def select_timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that count."""
    return rows[(rows["phase"] == "blocks") & (rows["turn_step"] > 0)]


def pair_blocks(rows: pd.DataFrame, column: str = "iteration_ms") -> pd.DataFrame:
    """Median of a time, in ms, by block (index) and arm (column)."""
    return select_timed(rows).groupby(["block", "arm"])[column].median().unstack("arm")


def gradient_comm_ms(rows: pd.DataFrame) -> pd.Series:
    """Busy time of a step's gradient communication: exchange without parameter gathers, encode and decode included."""
    return rows["exchange_ms"] - rows["gather_ms"] + rows["encode_ms"] + rows["decode_ms"]


def summarise_cell(cell: Cell) -> pd.DataFrame:
    """One line per arm, in the plan's order."""
    rows = cell.rows.assign(gradient_comm_ms=gradient_comm_ms(cell.rows))
    blocks, comm_blocks = pair_blocks(rows), pair_blocks(rows, "gradient_comm_ms")
    return pd.DataFrame([_summarise_arm(cell, rows, arm, blocks, comm_blocks) for arm in cell.shared["cell"]["arms"]])


def _summarise_arm(
    cell: Cell, rows: pd.DataFrame, arm: str, blocks: pd.DataFrame, comm_blocks: pd.DataFrame
) -> dict[str, Any]:
    shared, link = cell.shared["cell"], cell.shared["link"]
    timed = select_timed(rows)
    mine, baseline = timed[timed["arm"] == arm], timed[timed["arm"] == "fsdp"]
    time, is_counted = spread(mine["iteration_ms"]), cell.is_counted(arm)
    nbytes, baseline_bytes = _sent_bytes(mine, is_counted), _sent_bytes(baseline, is_counted)
    line = {
        "network": shared["network"],
        "machine": cell.machine,
        "cell": shared["key"],
        "setting": cell.shared["setting"],
        "rate_mbps": link["rate_mbps"],
        "nominal_mbps": link["nominal_mbps"],
        "time_dilation": link["time_dilation"],
        "arm": arm,
        "bytes_counted_by": "exchange" if is_counted else "interface",
        "steps": time.n,
        "blocks": blocks[arm].count(),
        "iteration_ms": time.median,
        "iteration_ms_p20": time.p20,
        "iteration_ms_p80": time.p80,
        "scaled_iteration_ms": time.median / link["time_dilation"],
        "sent_bytes": nbytes,
        "link_sent_bytes": mine["link_sent_bytes"].mean(),
        "saved_bytes_frac": 1 - nbytes / baseline_bytes,
        "allowed_frac": _allowed_frac(cell, mine, arm),
        "dense_frac": _dense_frac(mine),
    }
    for name in BASELINES:
        line |= spell(f"saved_vs_{name}_frac", paired_saving(blocks, arm, name))
    line["realised_frac"] = _realised_frac(line, blocks, baseline_bytes)
    line["gradient_comm_ms"] = mine["gradient_comm_ms"].median()
    comm = bootstrap_median(1 - comm_blocks[arm] / comm_blocks["fsdp"])
    line |= spell("saved_gradient_comm_frac", comm)
    for column in ("compute_ms", "exposed_comm_ms", "encode_ms", "decode_ms"):
        line[column] = mine[column].median()
    return line


def spell(name: str, estimate: Estimate) -> dict[str, float]:
    """An estimate as columns of a table: ``name``, ``name_low``, ``name_high``."""
    return {name: estimate.middle, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def read_estimate(line: pd.Series, name: str, n: int | None = None) -> Estimate:
    """The reverse of :func:`spell`; n: the number of blocks if not given."""
    n = int(line["blocks"] if n is None else n)
    return Estimate(n, line[name], line[f"{name}_low"], line[f"{name}_high"])


def _sent_bytes(timed: pd.DataFrame, is_counted: bool) -> float:
    """Per step: counted by the exchange or, where torch communicates, by the interface (headers included)."""
    if is_counted:
        return (timed["grad_wire_bytes"] + timed["param_wire_bytes"]).mean()
    return timed["link_sent_bytes"].mean()


def _dense_frac(timed: pd.DataFrame) -> float:
    """Share of the buckets that the policy selected and that travelled dense all the same."""
    buckets = timed["dense_buckets"] + timed["compressed_buckets"]
    return (timed["dense_buckets"] / buckets.where(buckets > 0)).mean()


def _allowed_frac(cell: Cell, mine: pd.DataFrame, arm: str) -> float:
    """Closed form: the share of ``fsdp``'s bytes that the arm's gradients do without. NaN where torch communicates."""
    expected = cell.shared["expected_gradient_bytes"]
    if not cell.is_counted(arm):
        return math.nan
    return (expected["fsdp"] - expected[arm]) / (expected["fsdp"] + mine["param_wire_bytes"].mean())


def _realised_frac(line: dict[str, Any], blocks: pd.DataFrame, baseline_bytes: float) -> float:
    """Saved time over the time that the link needs for the saved bytes; NaN without a cap or without saved bytes.

    Headers count. Example: 1 MB less on a link of 1.046 MB/s and 0.9 s less per step: 0.9.
    """
    saved_bytes = baseline_bytes - line["sent_bytes"]
    is_torch = line["bytes_counted_by"] == "interface"
    if line["rate_mbps"] is None or is_torch or saved_bytes < 0.001 * baseline_bytes:
        return math.nan
    saved_ms = (blocks["fsdp"] - blocks[line["arm"]]).median()
    return saved_ms / (saved_bytes * WIRE_BYTES_PER_BYTE * 8 / line["rate_mbps"] / 1e3)


def find_crossovers(table: pd.DataFrame, baselines: tuple[str, ...] = BASELINES) -> pd.DataFrame:
    """For every setting, arm and baseline the link rate above which the arm is no longer faster.

    Cells of different machines or networks never meet.
    """
    is_compressor = (table["bytes_counted_by"] == "exchange") & ~table["arm"].isin(["noop", "fsdp"])
    capped = table[table["rate_mbps"].notna() & is_compressor]
    by_baseline = [capped.assign(baseline=name, saved=capped[f"saved_vs_{name}_frac"]) for name in baselines]
    pairs = pd.concat(by_baseline).sort_index(kind="stable")  # an arm's baselines beside each other
    pairs = pairs[pairs["arm"] != pairs["baseline"]]
    return find_zeros(pairs, ["network", "machine", "setting", "arm", "baseline"], "saved")


def find_zeros(table: pd.DataFrame, keys: list[str], column: str) -> pd.DataFrame:
    """For every group of ``keys`` the link rate above which ``column``, a share saved, is no longer above zero.

    ``bound``: see :func:`analysis.numbers.stats.cross_zero`; ``rates``: how many were measured. At least two must be.
    """
    found = []
    for names, group in table.groupby(keys, sort=False):
        points = group[["rate_mbps", column]].dropna().sort_values("rate_mbps").to_numpy(dtype=float)
        if len(points) >= 2:
            rate, bound = cross_zero(points[:, 0], points[:, 1])
            line = dict(zip(keys, names, strict=True))
            found.append({**line, "crossover_mbps": rate, "bound": bound, "rates": len(points)})
    return pd.DataFrame(found, columns=[*keys, "crossover_mbps", "bound", "rates"])
