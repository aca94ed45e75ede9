"""The threshold of a sparsifying compressor: which values to look at, and an estimate from them alone.

Nothing is carried from step to step: last step's threshold, however corrected, is far off while the residual builds up
(experiments/threshold).
"""

from __future__ import annotations

from types import ModuleType
from zlib import crc32

import torch
from torch import Tensor

from tagc.codec.sparsify import draw_positions
from tagc.compressors.base import BucketSpec
from tagc.config import CompressorConfig


def draw_sample(config: CompressorConfig, spec: BucketSpec, step: int) -> Tensor:
    """Positions in every shard whose values the estimator needs: int64 [K].

    ``sampled`` draws ``threshold_sample`` of them, others by bucket and step, the same on every rank and backend;
    ``exact`` and ``lognormal`` need all; at sparsity 0 the threshold is zero, so one is enough. Host syncs: none.
    """
    if config.sparsity == 0:
        return torch.zeros(1, dtype=torch.int64, device=spec.device)
    if config.threshold == "sampled":
        shift = crc32(f"{spec.own_seed}/{step}".encode())
        return draw_positions(spec.numel, config.threshold_sample, shift, spec.device)
    return torch.arange(spec.numel, device=spec.device)


def estimate_threshold(sample_WK: Tensor, config: CompressorConfig, kernels: ModuleType) -> Tensor:
    """Magnitude above which ``1 - sparsity`` of the sample lies, per shard: float32 [W, 1]. Changes nothing.

    sample_WK: float32, gradient plus residual at the positions of :func:`draw_sample`. Host syncs: none.
    """
    if config.sparsity == 0:
        return sample_WK.new_zeros(1)
    estimate = kernels.threshold_lognormal if config.threshold == "lognormal" else kernels.threshold_exact
    return estimate(sample_WK, 1 - config.sparsity)
