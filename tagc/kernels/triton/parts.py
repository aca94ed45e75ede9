"""Pieces of kernels: bits, bfloat16, the sum of gradient and residual, and the Hadamard transform.

A program owns a tile of TILE consecutive elements of one shard. ``local`` are their offsets in the tile; pointers are
moved to the tile's first element beforehand, with a 64-bit offset, so that no int32 can overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_bits(bits_ptr, local, inside):
    """The bit of each element: int32 0 or 1, and 0 outside. bits_ptr: uint8, at the tile's first byte."""
    byte = tl.load(bits_ptr + (local >> 3), mask=inside, other=0).to(tl.int32)
    return (byte >> (local & 7)) & 1


@triton.jit
def pack_mask(mask, TILE: tl.constexpr):
    """bool [TILE] -> uint8 [TILE // 8], least significant bit first."""
    bits = tl.reshape(mask.to(tl.int32), (TILE // 8, 8))
    return tl.sum(bits << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def count_bits(value):
    """The number of set bits of non-negative integers up to 255."""
    value = value - ((value >> 1) & 0x55)
    value = (value & 0x33) + ((value >> 2) & 0x33)
    return (value + (value >> 4)) & 0x0F


@triton.jit
def add_old(gradient, old, decay):
    """``gradient + decay * old`` with one rounding, as PyTorch's fused ``add(alpha)``."""
    return tl.fma(old, decay, gradient)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 -> dtype (float32 or bfloat16), to nearest even. In integers: the interpreter's own cast truncates."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)  # rounding up a NaN would end it
        x = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x


@triton.jit
def widen(x):
    """float32 or bfloat16 -> float32, exactly."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def transform_blocks(x, factor, LEVELS: tl.constexpr):
    """Hadamard transform of every 2**LEVELS values of x, float32 [T], times ``factor``, in the reference's order."""
    count: tl.constexpr = x.shape[0]
    for level in tl.static_range(LEVELS):
        pairs = tl.permute(tl.reshape(x, (count // 2 ** (level + 1), 2, 2**level)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (count,))
    return x * factor
