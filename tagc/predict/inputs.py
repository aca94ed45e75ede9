"""From a model, a configuration and measured processor times to the units that the cost model takes, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tagc.config import Config, ModelConfig, validate
from tagc.config.methods import SKETCHES
from tagc.predict.cost_model import UnitCost, decode_growth
from tagc.predict.traffic import plan_traffic

Members = list[tuple[str, tuple[int, ...]]]  # (name, full shape)


def list_parameters(config: ModelConfig, vocab_size: int) -> dict[str, Members]:
    """Each FSDP unit's parameters, in forward order: what ``plan_units`` says of the model itself (a test compares)."""
    width = config.width

    def norm(name: str) -> Members:
        return [(f"{name}.weight", (width,)), *([(f"{name}.bias", (width,))] if config.bias else [])]

    def linear(name: str, rows: int, columns: int) -> Members:
        return [(f"{name}.weight", (rows, columns)), *([(f"{name}.bias", (rows,))] if config.bias else [])]

    blocks = {
        f"blocks.{i}": [
            *norm(f"blocks.{i}.ln_1"),
            *linear(f"blocks.{i}.attn.qkv", 3 * width, width),
            *linear(f"blocks.{i}.attn.proj", width, width),
            *norm(f"blocks.{i}.ln_2"),
            *linear(f"blocks.{i}.mlp.fc", 4 * width, width),
            *linear(f"blocks.{i}.mlp.proj", width, 4 * width),
        ]
        for i in range(config.layers)
    }
    embedding: Members = [("wte.weight", (vocab_size, width))]
    positions: Members = [("wpe.weight", (config.context, width))]
    if config.tie_weights:
        return {"root": [*embedding, *positions, *norm("ln_f")], **blocks}
    head: Members = [*norm("ln_f"), ("lm_head.weight", (vocab_size, width))]
    return {"root": positions, "wte": embedding, **blocks, "head": head}


@dataclass(frozen=True)
class CodecTimes:
    """What one rank spent on an element of the buckets (dense columns included) at ``ranks`` ranks."""

    encode_ns_per_element: float
    decode_ns_per_element: float  # of the whole bucket, not of the shard
    ranks: int
    density: float  # share that a rank keeps
    weights_ns_per_element: float = 0.0  # both sides of a step's gathers, of the whole bucket


@dataclass(frozen=True)
class Workload:
    """A model's shapes, with its units."""

    config: Config
    vocab_size: int
    parameters: Mapping[str, Members]

    @property
    def flops_per_step(self) -> float:
        """Of one rank: 6 per token and element of a matrix that multiplies, and 12 T C per block for attention.

        The same as :func:`tagc.model.gpt.flops_per_token` counts on the model.
        """
        tokens = self.config.trainer.global_batch * self.config.model.context / self.config.cluster.ranks
        return sum(_flops_per_token(self, unit, only_matrices=True) for unit in self.parameters) * tokens

    @property
    def numel(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(unit.numel for unit in plan_traffic(self.config, self.parameters, self.config.cluster.ranks))

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters over all ranks."""
        return sum(math.prod(shape) for members in self.parameters.values() for _, shape in members)


def build_workload(config: Config, vocab_size: int) -> Workload:
    """The workload of a configuration; nothing is allocated. Errors: ``UserError`` as for a run."""
    validate(config)
    return Workload(config, vocab_size, list_parameters(config.model, vocab_size))


def _flops_per_token(workload: Workload, unit: str, only_matrices: bool) -> int:
    model = workload.config.model
    numel = 0
    for name, shape in workload.parameters[unit]:
        is_lookup = name.split(".")[0] == "wpe" or (name == "wte.weight" and not model.tie_weights)
        if not is_lookup and (len(shape) == 2 or not only_matrices):
            numel += math.prod(shape)
    return 6 * numel + (12 * model.context * model.width if unit.startswith("blocks") else 0)


def compute_shares(workload: Workload) -> dict[str, float]:
    """Share of every unit in a step's FLOPs: its parameters but looked-up ones, and attention's products in blocks."""
    weights = {unit: _flops_per_token(workload, unit, only_matrices=False) for unit in workload.parameters}
    total = sum(weights.values())
    return {unit: weight / total for unit, weight in weights.items()}


def make_units(workload: Workload, compute_ms: float, codec: CodecTimes, slowdown: float = 1.0) -> list[UnitCost]:
    """The units of one rank. compute_ms: forward and backward of a whole step; backward takes two thirds of it.

    slowdown: factor on the codec's times, such as ranks that share a core, or one over a time dilation. The codec of
    the weights counts with the forward passes.
    """
    config = workload.config
    ranks, micro_steps = config.cluster.ranks, config.accumulation
    growth = decode_growth(config.compressor.name in SKETCHES, codec.density, ranks, codec.ranks) if ranks > 1 else 0.0
    shares, units = compute_shares(workload), []
    for traffic in plan_traffic(config, workload.parameters, ranks):
        decoded = traffic.numel * (1 - traffic.dense_frac)
        unit_ms = compute_ms * shares[traffic.name] / micro_steps
        weights_ms = codec.weights_ns_per_element * traffic.numel * slowdown / 1e6 / micro_steps
        again = traffic.name.startswith("blocks") and config.trainer.reshard_after_forward
        units.append(
            UnitCost(
                forward_ms=unit_ms / 3 + weights_ms,
                backward_ms=unit_ms * 2 / 3,
                encode_ms=codec.encode_ns_per_element * traffic.numel * slowdown / 1e6,
                decode_ms=codec.decode_ns_per_element * decoded * growth * slowdown / 1e6,
                gather_bytes=traffic.gather_bytes,
                gradient_bytes=traffic.gradient_bytes,
                is_gathered_again=again and not traffic.is_gathered_once,
                is_gathered_once=traffic.is_gathered_once,
            )
        )
    return units
