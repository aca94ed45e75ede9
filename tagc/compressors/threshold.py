"""The threshold of a sparsifying compressor, by the estimator that the configuration names.

Nothing is carried from step to step: last step's threshold, however corrected, is far off while the residual builds up
(experiments/threshold).
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol
from zlib import crc32

from torch import Tensor

from tagc.codec.sparsify import draw_positions
from tagc.compressors.base import BucketSpec
from tagc.config import CompressorConfig


class Sparsifier(Protocol):
    """A compressor with a threshold."""

    config: CompressorConfig
    spec: BucketSpec
    kernels: ModuleType

    def add_residual(self, gradient_WN: Tensor) -> Tensor:
        """``gradient + residual_decay * residual``, in the gradient's memory."""

    def sample_values(self, gradient_WN: Tensor, position_K: Tensor) -> Tensor:
        """The same at the positions given, in every shard: float32 [W, K]. Changes nothing."""


def choose_threshold(compressor: Sparsifier, gradient_WN: Tensor, step: int) -> tuple[Tensor, float]:
    """Magnitude above which ``1 - sparsity`` of gradient plus residual lies, per shard: float32 [W, 1], or [1].

    Returns also the factor of the residual that the encoder has yet to apply: none where the estimator needed all
    values, so that their sum lies in the gradient's memory. Sampled positions differ by bucket and step and are the
    same on every rank and backend. Host syncs: none.
    """
    config, spec, kernels = compressor.config, compressor.spec, compressor.kernels
    density = 1 - config.sparsity
    if config.sparsity == 0:
        return gradient_WN.new_zeros(1), config.residual_decay
    if config.threshold == "sampled":
        shift = crc32(f"{spec.own_seed}/{step}".encode())
        position_K = draw_positions(spec.numel, config.threshold_sample, shift, spec.device)
        sample_WK = compressor.sample_values(gradient_WN, position_K)
        return kernels.threshold_exact(sample_WK, density), config.residual_decay
    estimate = {"exact": kernels.threshold_exact, "lognormal": kernels.threshold_lognormal}[config.threshold]
    return estimate(compressor.add_residual(gradient_WN), density), 0.0
