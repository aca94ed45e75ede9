"""Private kernels of block quantisation. Launched by blocks.py.

Shape letters: W ranks, N elements of one shard, K = ceil(N / BLOCK) scales, M = ceil(N * BITS / 8) bytes of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tagc.kernels.triton.parts import add_old, narrow, widen


@triton.jit
def quantize(
    gradient_ptr,
    residual_ptr,
    codes_ptr,
    scales_ptr,
    own_ptr,
    squares_ptr,
    decay,
    rank,
    numel,
    scales,
    code_bytes,
    HAS_DECAY: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Add the residual and round BLOCKS blocks of one shard to integers; keep the rounding error.

    Grid: (tiles of BLOCKS blocks, W). Reads gradient and residual once. BLOCK is even, so that every byte of two codes
    belongs to one program; every program writes its own blocks only: no races. squares_WT: float32, per program.
    """
    tile, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tile * (BLOCKS * BLOCK)
    block, offset = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    local = block[:, None] * BLOCK + offset[None, :]
    inside = local < numel - base
    at = w * numel + base + local
    x = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    if HAS_DECAY:
        x = add_old(x, widen(tl.load(residual_ptr + at, mask=inside, other=0.0)), decay)
    if w == rank:
        tl.store(own_ptr + base + local, x, mask=inside)
    magnitude = tl.abs(x)
    finite = magnitude < float("inf")  # false for NaN too
    sound = tl.min(finite.to(tl.int32), axis=1) & (w != rank).to(tl.int32)
    largest = tl.max(tl.where(finite, magnitude, 0.0), axis=1)
    limit: tl.constexpr = 2 ** (BITS - 1) - 1
    scale = tl.where(sound != 0, tl.div_rn(largest, tl.full((BLOCKS,), limit, tl.float32)), 0.0)
    used = (scale > 0)[:, None] & finite
    quotient = tl.div_rn(tl.where(used, x, 0.0), tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], x.shape))
    # Adding 1.5 * 2**23 leaves no room for a fraction, so the sum rounds to an integer, half to even.
    rounded = (quotient + 12582912.0) - 12582912.0
    q = tl.minimum(tl.maximum(rounded, -limit), limit)
    rest = tl.where(used, x - q * scale[:, None], x)
    if w == rank:
        rest = tl.zeros_like(x)
    tl.store(residual_ptr + at, narrow(rest, residual_ptr.dtype.element_ty), mask=inside)

    scale_at = tile * BLOCKS + block
    tl.store(scales_ptr + w * scales + scale_at, scale, mask=scale_at < scales)
    per_byte: tl.constexpr = 8 // BITS
    codes = tl.reshape(q.to(tl.int32) & (2**BITS - 1), (BLOCKS * BLOCK // per_byte, per_byte))
    codes = tl.sum(codes << (tl.arange(0, per_byte) * BITS)[None, :], axis=1)
    byte = tl.arange(0, BLOCKS * BLOCK // per_byte)
    byte_base = base // per_byte
    tl.store(codes_ptr + w * code_bytes + byte_base + byte, codes.to(tl.uint8), mask=byte < code_bytes - byte_base)
    tl.store(squares_ptr + w * tl.num_programs(0) + tile, tl.sum(tl.sum(rest * rest, axis=1), axis=0))


@triton.jit
def add_blocks(
    codes_ptr,
    scales_ptr,
    own_ptr,
    ranks,
    numel,
    scales,
    code_bytes,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """own_N += ``q * scale`` of ranks 0 to W - 1, in that order. Grid: (tiles,). Each program writes its own tile."""
    base = tl.program_id(0) * TILE
    local = tl.arange(0, TILE)
    inside = local < numel - base
    total = tl.load(own_ptr + base + local, mask=inside, other=0.0)
    per_byte: tl.constexpr = 8 // BITS
    half: tl.constexpr = 2 ** (BITS - 1)
    for _ in range(ranks):  # pointers move from row to row, in 64 bits
        byte = tl.load(codes_ptr + base // per_byte + local // per_byte, mask=inside, other=0)
        code = (byte.to(tl.int32) >> (local % per_byte * BITS)) & (2**BITS - 1)
        q = (code ^ half) - half  # two's complement
        scale = tl.load(scales_ptr + base // BLOCK + (base % BLOCK + local) // BLOCK, mask=inside, other=0.0)
        total += q.to(tl.float32) * scale
        codes_ptr += code_bytes
        scales_ptr += scales
    tl.store(own_ptr + base + local, total, mask=inside)
