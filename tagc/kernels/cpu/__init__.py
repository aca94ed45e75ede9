"""The CPU backend: numba loops on one core, without the interpreter lock. Same contract as the reference."""

from __future__ import annotations

from tagc.kernels.cpu.blocks import decode_blocks, encode_blocks
from tagc.kernels.cpu.packed import decode_packed, encode_packed
from tagc.kernels.cpu.sketch import add_residual, decode_sketch, encode_sketch
from tagc.kernels.reference import threshold_exact, threshold_lognormal, threshold_sampled

__all__ = [
    "add_residual",
    "decode_blocks",
    "decode_packed",
    "decode_sketch",
    "encode_blocks",
    "encode_packed",
    "encode_sketch",
    "threshold_exact",
    "threshold_lognormal",
    "threshold_sampled",
]
