"""The papers' claims (targets.csv) beside what was measured, and a verdict that follows from the rows by rule.

A value counts as reached if its interval reaches the target and has the right sign. *reproduced*: at the claim's link,
or, for a loss that may be at most so high, in every setting. *partly*: there the right sign but too little, or from
less than three values, or in some settings only; or not measured there, but right at another link. *not*: measured
there, and wrong. *not measured*: no row there, and none elsewhere that speaks for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis.arms import compressor_of
from analysis.numbers.cells import read_estimate
from analysis.numbers.stats import Estimate
from analysis.page.sheet import Sheet, format_estimate

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

    cells: lines of :func:`analysis.numbers.cells.summarise_cell`; losses: of
    :func:`analysis.numbers.losses.compare_losses`.
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
        is_headline = metric == "headline_loss_increase"  # of this very arm, not of all settings of a compressor
        names = losses["arm"] if is_headline else losses["arm"].map(compressor_of)
        rows = losses[(names == target["arm"]) & (losses["pairs"] > 0)]
        if not is_headline:
            rows = rows[rows["sparsity"] == rows["sparsity"].max()]  # the strongest setting that was run
        columns = ["degradation_frac", "degradation_frac_low", "degradation_frac_high"]
        return [
            Evidence(f"{line['arm']} ({line['setting']})", Estimate(int(line["pairs"]), *line[columns]), True)
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


def judge(target: dict[str, Any], evidence: Sequence[Evidence], show_places: bool = True) -> tuple[str, str]:
    """Verdict and why. At least: by the best value at the claim's link and the best elsewhere. At most: by all."""
    known = [item for item in evidence if not math.isnan(item.estimate.middle)]
    if not known:
        told = "its runs gave no number: a seed diverged or was never validated" if evidence else None
        return "not measured", told or target["if_not_measured"] or "no row of this arm and metric is recorded"
    if target["kind"] == "at_most":
        return _judge_at_most(target, known, len(evidence) - len(known), show_places)
    here, elsewhere = (_find_best([item for item in known if item.at_condition is flag]) for flag in (True, False))
    where = {"10gbps": "at a scaled 10 Gbit/s", "low": "where communication dominates"}.get(target["link"], "")
    told = f"{where} not measured" if here is None else _tell(here, known, show_places)
    if here is not None and is_reached(here.estimate, target):
        return "reproduced", told
    if here is not None and points_right(here.estimate, target):
        return "partly", told
    if elsewhere is not None:
        told += f"; elsewhere {_tell(elsewhere, known, show_places)}"
    if here is not None:
        return "not", told
    return "partly" if elsewhere is not None and points_right(elsewhere.estimate, target) else "not measured", told


def _judge_at_most(
    target: dict[str, Any], known: Sequence[Evidence], diverged: int, show_places: bool
) -> tuple[str, str]:
    """By every setting of at least ``LEAST_N`` values, so that a setting that is easy does not decide; else by all.

    diverged: settings that gave no number; none of them stayed below.
    """
    chosen = [item for item in known if item.estimate.n >= LEAST_N] or known
    told = _tell(max(chosen, key=lambda item: item.estimate.middle), chosen, show_places, "worst")
    if diverged:
        told += f"; no number in {diverged} more, where a seed diverged"
    if not diverged and all(is_reached(item.estimate, target) for item in chosen):
        return "reproduced", told
    if any(points_right(item.estimate, target) for item in chosen):
        return "partly", told
    return "not", told


def _tell(chosen: Evidence, evidence: Sequence[Evidence], show_places: bool, rank: str = "best") -> str:
    """The value, where it was measured, and among how many it is the best or worst."""
    count = sum(item.at_condition is chosen.at_condition for item in evidence)
    place = f" in {chosen.place}" if show_places else ""
    return f"{format_estimate(chosen.estimate, show_n=True)}{place}{f', {rank} of {count}' if count > 1 else ''}"


def _find_best(evidence: Sequence[Evidence]) -> Evidence | None:
    return max(evidence, key=lambda item: item.estimate.middle, default=None)


class Verdict(NamedTuple):
    """A claim with what the rows say of it."""

    paper: str
    claim: str
    arm: str
    verdict: str
    why: str
    source: str


def list_verdicts(cells: pd.DataFrame, losses: pd.DataFrame, show_places: bool = True) -> list[Verdict]:
    """Every claim, judged; show_places: name the cells and settings. Arguments: see :func:`collect_evidence`."""
    found = []
    for target in load_targets():
        verdict, why = judge(target, collect_evidence(target, cells, losses), show_places)
        found.append(Verdict(target["paper"], target["claim"], target["arm"], verdict, why, target["source"]))
    return found


def make_claims_sheet(cells: pd.DataFrame, losses: pd.DataFrame, show_places: bool = True) -> Sheet:
    """Every claim with its verdict; show_places: name the cells and settings, and who reports the claim."""
    shown = 6 if show_places else 5
    lines = [tuple(verdict)[:shown] for verdict in list_verdicts(cells, losses, show_places)]
    note = (
        "Verdicts follow from the rows by rule. Reproduced: the interval reaches the claimed number, with the right "
        "sign, at the claim's link; a loss, in every setting of at least three seeds. Partly: too little or from too "
        "few values there, or not in all settings; or not measured there, but right at another link. Not: measured "
        "there, and wrong. Source `secondary`: reported by others than its authors."
    )
    headers = ("paper", "claim", "arm", "verdict", "measured there; elsewhere", "source")
    return Sheet("claims", "Claims and verdicts", note, headers[:shown], lines)
