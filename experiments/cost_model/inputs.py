"""From a model, a configuration and measured processor times to the units that the cost model takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tagc.config import Config, validate
from tagc.model.gpt import GPT, flops_per_token
from tagc.predict.cost_model import UnitCost, decode_growth
from tagc.predict.traffic import plan_traffic
from tagc.train.parallel import plan_units

SKETCHES = ("lhc", "tagc", "tagc2")


@dataclass(frozen=True)
class CodecTimes:
    """What one rank spent on an element of the buckets (dense columns included) at ``ranks`` ranks."""

    encode_ns_per_element: float
    decode_ns_per_element: float  # of the whole bucket, not of the shard
    ranks: int
    density: float  # share that a rank keeps


@dataclass(frozen=True)
class Workload:
    """A model on meta tensors, with its units."""

    config: Config
    model: GPT
    parameters: Mapping[str, list[tuple[str, torch.Size]]]

    @property
    def flops_per_step(self) -> float:
        """Of one rank."""
        tokens = self.config.trainer.global_batch * self.config.model.context / self.config.cluster.ranks
        return flops_per_token(self.model) * tokens

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(unit.numel for unit in plan_traffic(self.config, self.parameters, self.config.cluster.ranks))


def build_workload(config: Config, vocab_size: int) -> Workload:
    """The workload of a configuration; nothing is allocated. Errors: ``UserError`` as for a run."""
    validate(config)
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
    return Workload(config, model, plan_units(model))


def compute_shares(workload: Workload) -> dict[str, float]:
    """Share of every unit in a step's FLOPs: its matrices, and attention's products in the blocks."""
    model = workload.config.model
    weights = {}
    for unit, members in workload.parameters.items():
        matrices = sum(math.prod(shape) for name, shape in members if name.split(".")[0] not in ("wte", "wpe"))
        weights[unit] = 6 * matrices + (12 * model.context * model.width if unit.startswith("blocks") else 0)
    total = sum(weights.values())
    return {unit: weight / total for unit, weight in weights.items()}


def make_units(workload: Workload, compute_ms: float, codec: CodecTimes, slowdown: float = 1.0) -> list[UnitCost]:
    """The units of one rank. compute_ms: forward and backward of a whole step; backward takes two thirds of it.

    slowdown: factor on the codec's times, such as ranks that share a core, or one over a time dilation.
    """
    config = workload.config
    ranks, micro_steps = config.cluster.ranks, config.accumulation
    growth = decode_growth(config.compressor.name in SKETCHES, codec.density, ranks, codec.ranks)
    shares, units = compute_shares(workload), []
    for traffic in plan_traffic(config, workload.parameters, ranks):
        decoded = traffic.numel * (1 - traffic.dense_frac)
        unit_ms = compute_ms * shares[traffic.name] / micro_steps
        units.append(
            UnitCost(
                forward_ms=unit_ms / 3,
                backward_ms=unit_ms * 2 / 3,
                encode_ms=codec.encode_ns_per_element * traffic.numel * slowdown / 1e6,
                decode_ms=codec.decode_ns_per_element * decoded * growth * slowdown / 1e6,
                gather_bytes=traffic.gather_bytes,
                gradient_bytes=traffic.gradient_bytes,
                is_gathered_again=traffic.name.startswith("blocks")
                and config.trainer.reshard_after_forward
                and not traffic.is_gathered_once,
            )
        )
    return units
