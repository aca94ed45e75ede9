"""Thresholds of the contract on a GPU: PyTorch's own kernels, without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec.sparsify import threshold_exact, threshold_lognormal

__all__ = ["threshold_exact", "threshold_lognormal", "threshold_sampled"]


def threshold_sampled(x: Tensor, density: float, sample: int, generator: torch.Generator) -> Tensor:
    """As :func:`tagc.codec.sparsify.threshold_sampled`: the same draws, so the same threshold.

    The positions go to the device from pinned memory: a copy from pageable memory would wait for it. Host syncs: none.
    """
    if x.shape[-1] <= sample:
        return threshold_exact(x, density)
    position = torch.randint(x.shape[-1], (sample,), generator=generator)
    if x.is_cuda:
        position = position.pin_memory().to(x.device, non_blocking=True)
    return threshold_exact(x.index_select(-1, position), density)
