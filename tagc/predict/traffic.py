"""How many bytes every FSDP unit moves per exchange, in closed form, at any number of ranks: nothing is run.

Torch is not imported: sizes are those of :mod:`tagc.codec.sizes`. What decides between a message and a dense step is
told again here, and a test holds it against the compressors and the gather themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tagc.codec.sizes import (
    bitmap_bytes,
    block_count,
    code_bytes,
    delta_bytes,
    expected_union,
    fit_layout,
    plan_capacity,
    plan_layout,
)
from tagc.comm.policy import is_compressed
from tagc.config import CompressorConfig, Config, WeightsConfig
from tagc.config.methods import SKETCHES
from tagc.errors import UserError

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
DENSE_BYTES = {"noop": 0, "fsdp": 4, "bf16": 2}  # of an element, whatever the layer policy says

Parameters = Mapping[str, Sequence[tuple[str, Sequence[int]]]]  # of each unit: (name, full shape), in forward order


@dataclass(frozen=True)
class UnitTraffic:
    """One unit on one rank. Bytes are sent, to all peers together; memory is this rank's."""

    name: str
    gather_bytes: int  # in one all-gather of the parameters, dense rounds apart
    is_gathered_once: bool  # a replica spares every other gather of a step
    gradient_bytes: int  # in the gradient exchange of a step, past any warm-up
    numel: int  # elements of the whole bucket, padding included
    dense_frac: float  # share of the compressor's part that goes dense: a larger message, an overloaded sketch
    residual_bytes: int  # memory of what is kept for the next gradient; its copy for undo takes as much in a step
    replica_bytes: int  # memory of the weights that every rank keeps


def plan_traffic(config: Config, parameters: Parameters, ranks: int) -> list[UnitTraffic]:
    """The traffic of every unit. An adaptive sketch is sized for ranks that select independently with the density
    ``1 - compressor.sparsity``: real unions are smaller, so its bytes are an upper bound from 3 ranks on.

    Errors: ``UserError`` for a shard of more elements than an int32 can count.
    """
    item_bytes = ITEM_BYTES[config.trainer.param_dtype]
    try:
        return [_plan_unit(config, unit, members, ranks, item_bytes) for unit, members in parameters.items()]
    except ValueError as error:
        raise UserError(str(error)) from None


def _plan_unit(
    config: Config, unit: str, members: Sequence[tuple[str, Sequence[int]]], ranks: int, item_bytes: int
) -> UnitTraffic:
    method = config.compressor
    sizes = [(name, shape, math.ceil(shape[0] / ranks) * math.prod(shape[1:])) for name, shape in members]
    shard_numel = sum(numel for _, _, numel in sizes)
    chosen = sum(numel for name, shape, numel in sizes if is_compressed(name, shape, method))
    sent, residual, dense_frac = 0, 0, 0.0
    if method.name in DENSE_BYTES:
        sent = shard_numel * DENSE_BYTES[method.name]
    else:
        sent = (shard_numel - chosen) * 4
        if chosen:
            message = message_bytes(method, chosen, ranks)
            dense_frac = float(message is None)
            sent += chosen * ITEM_BYTES[method.value_dtype] if message is None else message
            owed = bitmap_bytes(chosen) if method.name in SKETCHES else 0
            residual = ranks * (chosen * ITEM_BYTES[method.residual_dtype] + owed)
    is_whole = config.weights.name == "full" or ranks * shard_numel < config.weights.min_numel
    keeps = config.weights.keeps_replica and not is_whole
    replica = ITEM_BYTES.get(config.weights.replica_dtype, item_bytes)
    return UnitTraffic(
        unit,
        (ranks - 1) * (shard_numel * item_bytes if is_whole else _weight_bytes(config.weights, shard_numel)),
        keeps,
        (ranks - 1) * sent,
        ranks * shard_numel,
        dense_frac,
        residual,
        ranks * shard_numel * replica if keeps else 0,
    )


def message_bytes(config: CompressorConfig, numel: int, ranks: int) -> int | None:
    """What a lossy method sends one peer of a shard of ``numel`` elements; None if it sends the shard dense.

    >>> message_bytes(CompressorConfig("packed"), 1000, 2), message_bytes(CompressorConfig("int4"), 1024, 2)
    (565, 528)
    """
    density, value_bytes, dense = 1 - config.sparsity, ITEM_BYTES[config.value_dtype], False
    if config.name in SKETCHES:
        union = expected_union(numel, density, ranks)
        is_fitted = config.adaptive_ratio and config.sparsity > 0
        layout = fit_layout(numel, union, config.max_load) if is_fitted else plan_layout(numel, config.ratio)
        nbytes = bitmap_bytes(numel) + layout.sketch_numel * value_bytes
        # With sparsity 0 the gradients' own zeros decide, which only a run can show.
        dense = config.sparsity > 0 and union / layout.sketch_numel > config.max_load
    elif config.name == "packed":
        nbytes = bitmap_bytes(numel) + plan_capacity(numel, density, config.capacity_slack) * value_bytes
    else:
        nbytes = code_bytes(numel, int(config.name.removeprefix("int"))) + block_count(numel, config.block) * 4
    return None if config.dense_fallback and (dense or nbytes > numel * value_bytes) else nbytes


def _weight_bytes(config: WeightsConfig, numel: int) -> int:
    """What a gather sends one peer of a shard of ``numel`` elements."""
    if config.bits is None:
        return numel * ITEM_BYTES["bfloat16"]
    return delta_bytes(numel, config.bits, config.block, config.rotate_seed)
