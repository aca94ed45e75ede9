"""The papers' claims (targets.csv) beside what was measured, and a verdict that follows from the rows by rule.

A value counts as reached if its interval reaches the target and has the right sign. *reproduced*: at the claim's link.
*partly*: there the right sign but too little, or from less than three values; or not measured there, but right at
another link. *not*: measured there, and wrong. *not measured*: no row there, and none elsewhere that speaks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.arms import compressor_of
from analysis.cells import read_estimate
from analysis.sheet import MISSING, Sheet, format_estimate
from analysis.stats import Estimate

TARGETS = Path(__file__).with_name("targets.csv")
LEAST_N = 3  # values that an interval must come from to prove a claim
LOW_LINK_RATIO = 1.0  # "low bandwidth": dense communication takes longer than computation
SAVINGS = {"iteration_saving": "saved_vs_fsdp_frac", "gradient_comm_saving": "saved_gradient_comm_frac"}


class Evidence(NamedTuple):
    """One measured value that bears on a claim; at_condition: at the link that the claim speaks of."""

    place: str
    estimate: Estimate
    at_condition: bool


def load_targets(path: Path = TARGETS) -> list[dict[str, Any]]:
    """The claims, a dict each; empty fields are None."""
    frame = pd.read_csv(path)
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def collect_evidence(target: dict[str, Any], cells: pd.DataFrame, losses: pd.DataFrame) -> list[Evidence]:
    """All measured values of the claim's arm and metric.

    cells: lines of :func:`analysis.cells.summarise_cell`; losses: of :func:`analysis.losses.compare_losses`.
    """
    metric = target["metric"]
    if metric in SAVINGS and len(cells):
        rows = cells[(cells["arm"] == target["arm"]) & cells["rate_mbps"].notna()]
        return [
            Evidence(
                f"{line['cell']} ({line['network']})", read_estimate(line, SAVINGS[metric]), _is_at(line, cells, target)
            )
            for _, line in rows.iterrows()
        ]
    if metric.endswith("loss_increase") and len(losses):
        rows = losses[(losses["arm"].map(compressor_of) == target["arm"]) & (losses["pairs"] > 0)]
        if metric == "headline_loss_increase":
            rows = rows[rows["arm"] == target["arm"]]  # the option as it stands: sparsity 0.8, attention dense
        else:
            rows = rows[rows["sparsity"] == rows["sparsity"].max()]  # the strongest setting that was run
        names = ("degradation_frac", "degradation_frac_low", "degradation_frac_high")
        return [
            Evidence(f"{line['arm']} ({line['setting']})", Estimate(int(line["pairs"]), *line[list(names)]), True)
            for _, line in rows.iterrows()
        ]
    return []


def _is_at(line: pd.Series, cells: pd.DataFrame, target: dict[str, Any]) -> bool:
    """Whether a cell's link is the claim's: a scaled 10 Gbit/s, or one where dense communication dominates."""
    if target["link"] == "10gbps":
        return line["nominal_mbps"] == 10_000 and line["time_dilation"] > 1
    same = cells[(cells["cell"] == line["cell"]) & (cells["network"] == line["network"]) & (cells["arm"] == "fsdp")]
    return bool((same["exposed_comm_ms"] > LOW_LINK_RATIO * same["compute_ms"]).any())


def is_reached(estimate: Estimate, target: dict[str, Any]) -> bool:
    """The interval reaches the target with the right sign; at most: its upper end stays below."""
    if not estimate.is_known or estimate.n < LEAST_N:
        return False
    if target["kind"] == "at_most":
        return estimate.high <= target["target_frac"]
    return estimate.low > 0 and estimate.high >= target["target_frac"]


def points_right(estimate: Estimate, target: dict[str, Any]) -> bool:
    """Something of the claim is there: an interval above zero; at most: a middle below the target."""
    if target["kind"] == "at_most":
        return estimate.middle <= target["target_frac"]
    return estimate.low > 0 if estimate.is_known else estimate.middle > 0


def judge(target: dict[str, Any], evidence: Sequence[Evidence]) -> tuple[str, str]:
    """Verdict and why, from the best value at the claim's link and the best elsewhere."""
    if not evidence:
        return "not measured", target["if_not_measured"] or "no row of this arm and metric is recorded"
    here, elsewhere = (_best([e for e in evidence if e.at_condition is flag], target) for flag in (True, False))
    if all(math.isnan(item.estimate.middle) for item in evidence):
        return "not measured", "its runs gave no number: a seed diverged or was never validated"
    where = {"10gbps": "at a scaled 10 Gbit/s ", "low": "where communication dominates "}.get(target["link"], "")
    if here is not None and is_reached(here.estimate, target):
        return "reproduced", _tell(here, evidence)
    if here is not None and points_right(here.estimate, target):
        return "partly", _tell(here, evidence)
    told = where + ("not measured" if here is None else f"at best {_tell(here, evidence)}")
    if elsewhere is not None:
        told = f"{told}; elsewhere {_tell(elsewhere, evidence)}"
    if here is not None:
        return "not", told
    assert elsewhere is not None
    return "partly" if points_right(elsewhere.estimate, target) else "not measured", told


def _tell(best: Evidence, evidence: Sequence[Evidence]) -> str:
    """The value, where it was measured, and among how many it is the best."""
    count = sum(item.at_condition is best.at_condition for item in evidence)
    chosen = f", the best of {count}" if count > 1 else ""
    return f"{format_estimate(best.estimate, show_n=True)} in {best.place}{chosen}"


def _best(evidence: Sequence[Evidence], target: dict[str, Any]) -> Evidence | None:
    known = [item for item in evidence if not math.isnan(item.estimate.middle)]
    sign = -1 if target["kind"] == "at_most" else 1
    return max(known, key=lambda item: sign * item.estimate.middle, default=None)


def make_claims_sheet(cells: pd.DataFrame, losses: pd.DataFrame) -> Sheet:
    """Every claim with its verdict."""
    lines = []
    for target in load_targets():
        verdict, why = judge(target, collect_evidence(target, cells, losses))
        lines.append((target["paper"], target["claim"], target["arm"], verdict, why or MISSING, target["source"]))
    note = (
        "Verdicts follow from the rows by rule. Reproduced: the interval reaches the claimed number, with the right "
        "sign, at the claim's link. Partly: too little or from too few values there; or not measured there, but right "
        "at another link. Not: measured there, and wrong. Source `secondary`: reported by others than its authors."
    )
    return Sheet("claims", "Claims and verdicts", note, ("paper", "claim", "arm", "verdict", "why", "source"), lines)
