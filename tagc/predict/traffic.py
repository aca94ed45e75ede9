"""How many bytes every FSDP unit moves per exchange, in closed form, at any number of ranks: nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tagc.comm.buckets import build_bucket
from tagc.compressors import COMPRESSORS
from tagc.config import Config
from tagc.kernels import resolve_backend


@dataclass(frozen=True)
class UnitTraffic:
    """One unit on one rank."""

    name: str
    gather_bytes: int  # sent by a rank in one all-gather of the parameters
    gradient_bytes: int  # sent by a rank in the gradient exchange of a step, past any warm-up
    numel: int  # elements of the whole bucket, padding included
    dense_frac: float  # share of the compressor's part that goes dense: a larger message, an overloaded sketch


def plan_traffic(
    config: Config, parameters: Mapping[str, Sequence[tuple[str, torch.Size]]], ranks: int
) -> list[UnitTraffic]:
    """The traffic of every unit. parameters: each unit's (name, full shape), in forward order.

    The compressors' own closed forms on the meta device, so layer policy, padding and the fall-back to dense are those
    of a run. An adaptive sketch is sized for ranks that select independently, ``1 - (1-d)^(N-1)`` of a shard with
    ``d = 1 - compressor.sparsity``: real unions are smaller, so its bytes are an upper bound from 3 ranks on.
    """
    kernels = resolve_backend("reference")[1]
    wire_dtype = getattr(torch, config.trainer.param_dtype)
    meta = torch.device("meta")
    plan = []
    for unit, members in parameters.items():
        method = COMPRESSORS[config.compressor.name]
        bucket = build_bucket(config.compressor, method, config.seed, unit, members, ranks, 0, meta, kernels)
        chosen = [slot for slot in bucket.slots if slot.compressor.compresses]
        dense_numel = sum(slot.numel for slot in chosen if slot.compressor.explain_dense() is not None)
        shard_numel = sum(slot.numel for slot in bucket.slots)
        plan.append(
            UnitTraffic(
                unit,
                (ranks - 1) * shard_numel * wire_dtype.itemsize,
                sum(slot.compressor.steady_bytes for slot in bucket.slots),
                ranks * shard_numel,
                dense_numel / sum(slot.numel for slot in chosen) if chosen else 0.0,
            )
        )
    return plan
