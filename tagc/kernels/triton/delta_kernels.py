"""Private kernels of weight differences. Launched by delta.py.

A program owns BLOCKS blocks of BLOCK elements of one shard, a multiple of 8 elements in all, so that every byte of
codes belongs to one program. Shape letters: W ranks, N elements of one shard, K = ceil(N / BLOCK) scales, M bytes of
codes, T elements of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tagc.kernels.triton.parts import narrow, transform_blocks, widen


@triton.jit
def subtract_and_round(
    target_ptr,
    replica_ptr,
    signs_ptr,
    codes_ptr,
    scales_ptr,
    factor,
    numel,
    scales,
    code_bytes,
    ROTATE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Round BLOCKS blocks of ``target - replica`` to integers. Grid: (tiles,). Each program writes its own blocks only.

    scales_K: bfloat16. Without ROTATE ``signs_ptr`` is not read.
    """
    tile = tl.program_id(0).to(tl.int64)
    base = tile * (BLOCKS * BLOCK)
    local = tl.arange(0, BLOCKS * BLOCK)
    inside = local < numel - base
    target = widen(tl.load(target_ptr + base + local, mask=inside, other=0.0))
    x = target - widen(tl.load(replica_ptr + base + local, mask=inside, other=0.0))
    if ROTATE:
        x = transform_blocks(x * tl.load(signs_ptr + local % BLOCK), factor, LEVELS)
    x = tl.reshape(x, (BLOCKS, BLOCK))
    magnitude = tl.abs(x)
    finite = magnitude < float("inf")  # false for NaN too
    sound = tl.min(finite.to(tl.int32), axis=1)
    largest = tl.max(tl.where(finite, magnitude, 0.0), axis=1)
    limit: tl.constexpr = 2 ** (BITS - 1) - 1
    exact = tl.div_rn(largest, tl.full((BLOCKS,), limit, tl.float32))
    up = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000  # the next bfloat16 that is not below
    scale = up.to(tl.float32, bitcast=True)
    used = ((scale > 0) & (sound != 0))[:, None] & finite
    quotient = tl.div_rn(tl.where(used, x, 0.0), tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], x.shape))
    rounded = (quotient + 12582912.0) - 12582912.0  # 1.5 * 2**23: to an integer, half to even
    q = tl.minimum(tl.maximum(rounded, -limit), limit).to(tl.int32) & (2**BITS - 1)

    scale_at = tile * BLOCKS + tl.arange(0, BLOCKS)
    stored = tl.where(sound != 0, up >> 16, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(scales_ptr + scale_at, stored, mask=scale_at < scales)
    # 8 codes of 3 bits fill 3 bytes; codes of 8, 4 and 2 bits fill one byte, alone or together.
    together: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    bytes_each: tl.constexpr = together * BITS // 8
    words = tl.reshape(q, (BLOCKS * BLOCK // together, together)) << (tl.arange(0, together) * BITS)[None, :]
    words = tl.sum(words, axis=1)
    first = tl.arange(0, BLOCKS * BLOCK // together) * bytes_each
    byte_base = base // 8 * BITS
    for i in tl.static_range(bytes_each):
        byte = ((words >> (8 * i)) & 255).to(tl.uint8)
        tl.store(codes_ptr + byte_base + first + i, byte, mask=first + i < code_bytes - byte_base)


@triton.jit
def add_differences(
    codes_ptr,
    scales_ptr,
    replica_ptr,
    signs_ptr,
    factor,
    numel,
    scales,
    code_bytes,
    ROTATE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """replica_WN += ``q * scale``, rotated back. Grid: (tiles, W). Each program reads and writes its own blocks only.

    scales_WK: bfloat16. Without ROTATE ``signs_ptr`` is not read.
    """
    tile, w = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    base = tile * (BLOCKS * BLOCK)
    local = tl.arange(0, BLOCKS * BLOCK)
    byte, byte_base = local * BITS // 8, base // 8 * BITS
    codes_ptr += w * code_bytes + byte_base
    code = tl.load(codes_ptr + byte, mask=byte < code_bytes - byte_base, other=0).to(tl.int32)
    if BITS == 3:  # may end in the next byte
        after = tl.load(codes_ptr + byte + 1, mask=byte + 1 < code_bytes - byte_base, other=0)
        code = code | (after.to(tl.int32) << 8)
    half: tl.constexpr = 2 ** (BITS - 1)
    q = (((code >> (local * BITS % 8)) & (2**BITS - 1)) ^ half) - half  # two's complement
    block = tile * BLOCKS + local // BLOCK
    x = q.to(tl.float32) * widen(tl.load(scales_ptr + w * scales + block, mask=block < scales, other=0.0))
    if ROTATE:
        x = transform_blocks(x, factor, LEVELS) * tl.load(signs_ptr + local % BLOCK)
    inside = local < numel - base
    at = replica_ptr + w * numel + base + local
    tl.store(at, narrow(widen(tl.load(at, mask=inside, other=0.0)) + x, replica_ptr.dtype.element_ty), mask=inside)
