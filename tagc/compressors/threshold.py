"""The threshold of a sparsifying compressor, by the estimator that the configuration names."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tagc.compressors.base import BucketSpec
from tagc.config import CompressorConfig


def choose_threshold(
    x_WN: Tensor, config: CompressorConfig, spec: BucketSpec, step: int, kernels: ModuleType
) -> Tensor:
    """Magnitude above which ``1 - sparsity`` of every shard lies. x_WN: gradient plus residual. Returns [W, 1].

    Sampled positions differ by bucket and step, and are the same on every rank and backend. Host syncs: none.
    """
    density = 1 - config.sparsity
    if config.threshold == "exact":
        return kernels.threshold_exact(x_WN, density)
    if config.threshold == "lognormal":
        return kernels.threshold_lognormal(x_WN, density)
    generator = torch.Generator().manual_seed(spec.own_seed + step)
    return kernels.threshold_sampled(x_WN, density, config.threshold_sample, generator)
