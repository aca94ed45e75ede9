"""Which method trains faster at a model, ranks and a link: a prediction for each, and one sentence.

Times are modelled. Bytes and memory are closed forms. Losses are measured, elsewhere and on small models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tagc.config import (
    ClusterConfig,
    CompressorConfig,
    Config,
    ModelConfig,
    NetworkConfig,
    TrainerConfig,
    WeightsConfig,
    load_option,
)
from tagc.errors import UserError
from tagc.predict.cost_model import LinkCost, UnitCost, predict_iteration_ms
from tagc.predict.evidence import CPU, GPUS, Evidence, Loss
from tagc.predict.inputs import Workload, build_workload, make_units
from tagc.predict.traffic import plan_traffic

BASELINE = "fsdp"
METHODS = (  # asked for by default; lhc's bytes depend on zeros in the gradients, which only a run shows
    *("noop", "fsdp", "bf16", "tagc", "tagc2", "packed", "int8", "int4"),
    *("bf16+bf16", "int8+int8", "int4+delta8", "int4+delta4"),
)
STATE_BYTES = 16  # of an element of a rank's shard: fp32 parameter and gradient, AdamW's two moments
GPU_MESSAGE_MS = 0.01  # assumed, as in experiments/cost_model/scale.py
MOST_MICRO_BATCHES = 256
ACCEPTED_LOSS = 0.01  # the most that a recommended method may cost


@dataclass(frozen=True)
class Question:
    """What is asked. rate_mbps: of a node's link, per direction, which its ranks share; infinite: no cap."""

    model: ModelConfig
    vocab_size: int
    ranks: int
    rate_mbps: float
    gpu: str
    dtype: str
    accumulation: int = 1
    micro_batch: int = 12
    ranks_per_node: int = 1
    reshard: bool = True

    def __post_init__(self) -> None:
        """Errors: ``UserError`` naming the option, the value and what is legal."""
        if self.gpu not in GPUS:
            raise UserError(f"gpu={self.gpu} is not known; choose one of {', '.join(GPUS)}")
        if self.ranks < 2:
            raise UserError(f"ranks={self.ranks} exchange nothing; set 2 or more")
        for name in ("ranks_per_node", "accumulation", "micro_batch", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is not legal; set 1 or more")
        if self.accumulation > MOST_MICRO_BATCHES:
            raise UserError(
                f"accumulation={self.accumulation} is too many to play through; set {MOST_MICRO_BATCHES} or fewer"
            )
        if self.ranks % self.ranks_per_node:
            raise UserError(f"ranks={self.ranks} is not a multiple of ranks_per_node={self.ranks_per_node}; set one")
        if not self.rate_mbps > 0:
            raise UserError(f"bandwidth={self.rate_mbps} Mbit/s is not legal; set a rate > 0")

    def make_config(self, method: str) -> Config:
        """The run that ``method`` would be. Errors: ``UserError`` for an unknown method or an impossible size."""
        compressor, _, weights = method.partition("+")
        return Config(
            model=self.model,
            compressor=CompressorConfig(**load_option("compressor", compressor)),
            weights=WeightsConfig(**load_option("weights", weights or "full")),
            network=NetworkConfig(time_dilation=1),
            cluster=ClusterConfig(ranks=self.ranks),
            trainer=TrainerConfig(
                global_batch=self.ranks * self.micro_batch * self.accumulation,
                micro_batch=self.micro_batch,
                param_dtype=self.dtype,
                reshard_after_forward=self.reshard,
            ),
        )

    def make_link(self, evidence: Evidence) -> LinkCost:
        """A rank's share of its node's link: what it sends to ranks of its own node does not pass it."""
        away = self.ranks - self.ranks_per_node
        rate = self.rate_mbps * 1e6 / 8 * (self.ranks - 1) / (away * self.ranks_per_node) if away else math.inf
        if self.gpu == CPU:
            return LinkCost(self.ranks, rate, **evidence.rows["transport"])
        return LinkCost(self.ranks, rate, message_ms=GPU_MESSAGE_MS)


@dataclass(frozen=True)
class Prediction:
    """One method's answer. Bytes: sent by a rank per optimizer step. Memory: of a rank, activations apart."""

    method: str
    gradient_bytes: int
    weight_bytes: int
    memory_bytes: int
    modelled_ms: float
    bound_by: str
    dense_frac: float  # share of the elements to compress whose bucket goes dense
    loss: Loss | None

    @property
    def is_candidate(self) -> bool:
        """Whether it can be recommended: noop does not train, and what lhc sends is not known."""
        return self.method != "noop" and not self.method.startswith("lhc")

    def saved_vs(self, other: Prediction) -> float:
        """Share of the other's modelled time that this one saves."""
        return 1 - self.modelled_ms / other.modelled_ms


class Plan:
    """A method's units, ready to be timed at any rate. slowdown: of ranks that share a core."""

    def __init__(self, question: Question, method: str, evidence: Evidence, slowdown: float = 1.0) -> None:
        self.question, self.method, self.evidence = question, method, evidence
        self.compressor, _, weights = method.partition("+")
        self.weights = weights or "full"
        self.workload: Workload = build_workload(question.make_config(method), question.vocab_size)
        compute_s = evidence.compute_s(question.gpu, self.workload.flops_per_step, question.dtype)
        codec = evidence.find_codec(self.compressor, self.weights)
        self.units: list[UnitCost] = make_units(
            self.workload, compute_s * 1e3 * slowdown, codec, evidence.codec_slowdown(question.gpu) * slowdown
        )

    def predict_ms(self, rate_mbps: float | None = None) -> float:
        """Modelled time of an iteration, at the question's rate or another."""
        question = self.question if rate_mbps is None else replace(self.question, rate_mbps=rate_mbps)
        return predict_iteration_ms(
            self.units,
            question.make_link(self.evidence),
            micro_steps=question.accumulation,
            keeps_gathered=not question.reshard,
            prefetch=question.gpu != CPU,
        )

    def predict(self) -> Prediction:
        """The whole answer of one method."""
        question = self.question
        gathers = [unit.gathers(question.accumulation, not question.reshard) for unit in self.units]
        traffic = plan_traffic(self.workload.config, self.workload.parameters, question.ranks)
        numel = sum(unit.numel for unit in traffic)
        shard_bytes = STATE_BYTES * numel // question.ranks
        kept_bytes = sum(2 * unit.residual_bytes + unit.replica_bytes for unit in traffic)
        ms = self.predict_ms()
        return Prediction(
            self.method,
            sum(unit.gradient_bytes for unit in self.units),
            sum(count * unit.gather_bytes for count, unit in zip(gathers, self.units, strict=True)),
            shard_bytes + kept_bytes,
            ms,
            self._explain_bound(gathers, ms),
            sum(unit.dense_frac * unit.numel for unit in traffic) / numel,
            self.evidence.find_loss(self.compressor, self.weights, question.model.name, question.ranks),
        )

    def _explain_bound(self, gathers: Sequence[int], ms: float) -> str:
        """What is busy for most of the iteration, and for how much of it."""
        link, micro_steps = self.question.make_link(self.evidence), self.question.accumulation
        busy = {
            "link": sum(
                count * link.exchange_ms(unit.gather_bytes) + link.exchange_ms(unit.gradient_bytes)
                for count, unit in zip(gathers, self.units, strict=True)
            ),
            "computation": sum((unit.forward_ms + unit.backward_ms) * micro_steps for unit in self.units),
            "codec": sum(unit.encode_ms + unit.decode_ms for unit in self.units),
        }
        name = max(busy, key=lambda key: busy[key])
        return f"{name} {busy[name] / ms:.0%}"


def find_last(wins: Callable[[float], bool], lowest: float = 0.01, decades: int = 5) -> float | None:
    """The end of the last stretch of bandwidths on which ``wins`` holds, three digits: None if nowhere, infinite if it
    holds at the highest of those tried, ``lowest`` to ``decades`` decades above.
    """
    grid = [lowest * 10 ** (i / 4) for i in range(4 * decades + 1)]
    last = max((i for i, rate in enumerate(grid) if wins(rate)), default=None)
    if last is None or last == len(grid) - 1:
        return None if last is None else math.inf
    low, high = grid[last], grid[last + 1]
    for _ in range(7):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if wins(middle) else (low, middle)
    return float(f"{low:.3g}")


def list_outside(question: Question, parameter_count: int, evidence: Evidence) -> list[str]:
    """In what the question lies outside the settings that predictions were compared with measurements in."""
    known = evidence.errors
    checks = {
        f"gpu={question.gpu}: only CPU runs were compared; utilisation, message cost and codec times of a GPU are "
        "assumed": question.gpu == CPU,
        f"ranks={question.ranks}: compared at {' and '.join(map(str, known['ranks']))}": question.ranks
        in known["ranks"],
        f"bandwidth={question.rate_mbps:g} Mbit/s: compared from {known['rate_mbps'][0]:.0f} to "
        f"{known['rate_mbps'][1]:.0f}": known["rate_mbps"][0] <= question.rate_mbps <= known["rate_mbps"][1],
        f"{parameter_count / 1e6:.1f} M parameters: compared from {known['parameters'][0] / 1e6:.1f} to "
        f"{known['parameters'][1] / 1e6:.1f}": known["parameters"][0] <= parameter_count <= known["parameters"][1],
        f"ranks_per_node={question.ranks_per_node}: only one rank per link was measured": question.ranks_per_node == 1,
        f"accumulation={question.accumulation}: only 1 was compared": question.accumulation == 1,
    }
    return [text for text, is_inside in checks.items() if not is_inside]


def recommend(predictions: Sequence[Prediction], evidence: Evidence) -> str:
    """One sentence: the fastest method whose measured loss is acceptable, if the model can tell it from ``fsdp``.

    predictions: ``fsdp`` among them.
    """
    baseline = next(p for p in predictions if p.method == BASELINE)
    error = evidence.errors["saved_p90"]
    fit = [p for p in predictions if p.is_candidate and (p is baseline or _is_acceptable(p))]
    best = min(fit, key=lambda p: p.modelled_ms)
    saved = best.saved_vs(baseline)
    if saved <= error:
        rival = "" if best is baseline else f", {saved:.1%} by {best.method},"
        return (
            f"Stay with {BASELINE}: the best modelled saving{rival} is within the {100 * error:.1f} points by which "
            "one in ten of the model's savings has been wrong."
        )
    level = [p.method for p in fit if p is not best and saved - p.saved_vs(baseline) <= error]
    dropped = [p for p in predictions if p.is_candidate and p not in fit and p.modelled_ms < best.modelled_ms]
    faster = min(dropped, key=lambda p: p.modelled_ms, default=None)
    notes = [f"{', '.join(level)} cannot be told from it"] if level else []
    if best.method not in evidence.errors["methods"]:
        notes.append("no measured time of it was compared with the model")
    if faster is not None:
        notes.append(f"{faster.method} is modelled faster, but its loss {_explain_refusal(faster)}")
    assert best.loss is not None
    return (
        f"Use {best.method}: a modelled {best.modelled_ms:.4g} ms per iteration, {saved:.1%} less than {BASELINE}, for "
        f"{best.loss} of validation loss as measured on {best.loss.setting}{''.join('; ' + note for note in notes)}."
    )


def _is_acceptable(prediction: Prediction) -> bool:
    return prediction.loss is not None and prediction.loss.frac <= ACCEPTED_LOSS


def _explain_refusal(prediction: Prediction) -> str:
    return "was not measured" if prediction.loss is None else f"was {prediction.loss.frac:+.1%}"
