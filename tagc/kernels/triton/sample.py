"""Launcher of the contract's ``sample_values``. Shape letters: W ranks, N elements of a shard, K sampled positions."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.kernels.triton import launch, sample_kernels


def sample_values(
    gradient_WN: Tensor, state_WN: Tensor, owed_WB: Tensor | None, position_K: Tensor, decay: float
) -> Tensor:
    """As :func:`tagc.kernels.reference.sample_values`, all shards in one launch.

    Cost: one sector of gradient, of state and of bits for each position. Host syncs: none. Exactness: bitwise.
    """
    ranks, numel = gradient_WN.shape
    sample = position_K.numel()
    launch.check_numel(numel)
    checks: dict[str, launch.Check] = {
        "gradient": (gradient_WN, (torch.float32,), (ranks, numel)),
        "state": (state_WN, launch.STATE_DTYPES, (ranks, numel)),
        "position": (position_K, (torch.int64,), (sample,)),
    }
    if owed_WB is not None:
        checks["owed"] = (owed_WB, (torch.uint8,), (ranks, bitmap_bytes(numel)))
    launch.check_tensors(**checks)
    x_WK = torch.empty(ranks, sample, device=gradient_WN.device)
    sample_kernels.gather_sample[(triton.cdiv(sample, launch.SAMPLE_TILE), ranks)](
        gradient_WN,
        state_WN,
        state_WN if owed_WB is None else owed_WB,
        position_K,
        x_WK,
        float(decay),
        numel,
        bitmap_bytes(numel),
        sample,
        HAS_DECAY=decay != 0,
        HAS_OWED=owed_WB is not None,
        TILE=launch.SAMPLE_TILE,
        **launch.OPTIONS,
    )
    return x_WK
