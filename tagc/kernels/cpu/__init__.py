"""The CPU backend: numba loops on one core, without the interpreter lock. Same contract as the reference."""

from __future__ import annotations

from tagc.kernels.cpu.sketch import add_residual, decode_sketch, encode_sketch
from tagc.kernels.reference import threshold_exact, threshold_lognormal, threshold_sampled

__all__ = [
    "add_residual",
    "decode_sketch",
    "encode_sketch",
    "threshold_exact",
    "threshold_lognormal",
    "threshold_sampled",
]
