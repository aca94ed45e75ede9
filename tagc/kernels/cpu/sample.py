"""Values at sampled positions, and quantiles by numpy's partition: its vector code takes a 20th of torch's time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.codec.sparsify import count_kept
from tagc.kernels.cpu.arrays import as_array, byte_array, check_shards, float_array, state_array
from tagc.kernels.cpu.bits import fused_multiply_add, load
from tagc.kernels.cpu.compiled import compiled

_ZERO = np.float32(0)
_MAGNITUDE = np.int32(0x7FFFFFFF)


@compiled()
def _sample_shard(
    gradient_N: np.ndarray,
    state_N: np.ndarray,
    owed_B: np.ndarray | None,
    position_K: np.ndarray,
    decay: np.float32,
    x_K: np.ndarray,
) -> None:
    """x_K: out, ``gradient + decay * residual`` at the positions."""
    for k in range(len(position_K)):
        i = position_K[k]
        old = load(state_N, i)
        if owed_B is not None:  # decided when this is compiled
            old = old if (owed_B[i >> 3] >> (i & 7)) & 1 else _ZERO
        x_K[k] = fused_multiply_add(decay, old if decay != 0 else _ZERO, gradient_N[i])


def sample_values(
    gradient_WN: Tensor, state_WN: Tensor, owed_WB: Tensor | None, position_K: Tensor, decay: float
) -> Tensor:
    """See :func:`tagc.kernels.reference.sample_values`."""
    check_shards(gradient_WN, state_WN, gradient_WN.shape[-1])
    gradient, state = float_array(gradient_WN, "gradient"), state_array(state_WN, "residual")
    owed = None if owed_WB is None else byte_array(owed_WB, "owed")
    position = as_array(position_K, "position", torch.int64)
    x_WK = torch.empty(len(gradient_WN), len(position))
    x = x_WK.numpy()
    for w in range(len(gradient)):
        owed_B = None if owed is None else owed[w]
        _sample_shard(gradient[w], state[w], owed_B, position, np.float32(decay), x[w])
    return x_WK


def threshold_exact(x: Tensor, density: float) -> Tensor:
    """See :func:`tagc.codec.sparsify.threshold_exact`.

    Without their sign, floats are ordered like their bits, NaN last. Inverted, since numpy's vector code takes twenty
    times as long where most values equal the smallest one, as the zeros of absent tokens would.
    """
    keep = count_kept(x.shape[-1], density)
    falling = ~(float_array(x, "values").view(np.int32) & _MAGNITUDE)
    falling.partition(keep - 1, axis=-1)
    return torch.from_numpy((~falling[..., keep - 1 : keep]).view(np.float32))
