"""Integers of 8 or 4 bits with a scale per block: one block after another, each small enough for the nearest cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.codec.quantize import code_bytes, largest_code
from tagc.kernels.cpu.arrays import byte_array, check_numel, check_shards, float_array, state_array
from tagc.kernels.cpu.bits import float_from_bits, fused_multiply_add, load, store
from tagc.kernels.cpu.compiled import compiled
from tagc.kernels.reference import EncodedBlocks

_ZERO = np.float32(0)
# Adding and subtracting 1.5 * 2**23 rounds to an integer, half to even, anything smaller than 2**22.
_ROUNDER = np.float32(12582912.0)
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@compiled()
def _add_old(gradient: np.ndarray, residual: np.ndarray, decay: np.float32, x: np.ndarray) -> None:
    """``x = gradient + decay * residual``; ``decay=0`` ignores the residual."""
    for i in range(len(gradient)):
        old = load(residual, i) if decay != 0 else _ZERO
        x[i] = fused_multiply_add(decay, old, gradient[i])


@compiled()
def _find_scale(x: np.ndarray, limit: np.float32) -> np.float32:
    """Largest magnitude over ``limit``; 0 where a value is NaN or Inf.

    Without their sign, floats are ordered like their bits, and NaN and Inf come last: one integer maximum finds both.
    """
    largest = 0
    bits = x.view(np.int32)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & _MAGNITUDE)
    if largest >= _INFINITY:
        return _ZERO
    return float_from_bits(largest) / limit


@compiled()
def _quantize(x: np.ndarray, scale: np.float32, limit: np.float32, q: np.ndarray, residual: np.ndarray) -> None:
    """q: out, ``x / scale`` to the nearest integer, half to even; residual: out, what q leaves. x: out, the same."""
    for i in range(len(x)):
        rounded = (x[i] / scale + _ROUNDER) - _ROUNDER
        rounded = min(max(rounded, -limit), limit)
        q[i] = np.int8(np.int32(rounded))
        x[i] -= rounded * scale
        store(residual, i, x[i])


@compiled(fastmath={"reassoc"})
def _sum_squares(x: np.ndarray) -> np.float32:
    squares = _ZERO
    for i in range(len(x)):
        squares += x[i] * x[i]
    return squares


@compiled()
def _pack_nibbles(q: np.ndarray, codes: np.ndarray) -> None:
    """Two elements a byte, the first in the low half; q has an even number of elements, zero-filled."""
    for b in range(len(codes)):
        codes[b] = np.uint8((q[2 * b] & 15) | ((q[2 * b + 1] & 15) << 4))


@compiled()
def _encode_shard(
    gradient_N: np.ndarray,
    residual_N: np.ndarray,
    codes_M: np.ndarray,
    scales_K: np.ndarray,
    decay: np.float32,
    limit: np.float32,
    bits: int,
    block: int,
) -> float:
    """Encode a peer's shard; returns the squares of the new residual."""
    x_block, q_block = np.empty(block, np.float32), np.zeros(block + 1, np.int8)
    squares = 0.0
    for k in range(len(scales_K)):
        start, stop = k * block, min((k + 1) * block, len(gradient_N))
        x, q, residual = x_block[: stop - start], q_block[: stop - start], residual_N[start:stop]
        _add_old(gradient_N[start:stop], residual, decay, x)
        scale = _find_scale(x, limit)
        scales_K[k] = scale
        if scale > 0:
            _quantize(x, scale, limit, q, residual)
        else:
            q[:] = 0
            for i in range(len(x)):
                store(residual, i, x[i])
        squares += float(_sum_squares(x))
        if bits == 8:
            codes = codes_M[start:stop]
            for i in range(len(codes)):
                codes[i] = np.uint8(q[i])
        else:
            q_block[stop - start] = 0
            _pack_nibbles(q_block, codes_M[start // 2 : (stop + 1) // 2])
    return squares


@compiled()
def _take_own(gradient_N: np.ndarray, residual_N: np.ndarray, decay: np.float32) -> None:
    """The own shard: x in the gradient's memory, nothing left."""
    if decay != 0:
        for i in range(len(gradient_N)):
            gradient_N[i] = fused_multiply_add(decay, load(residual_N, i), gradient_N[i])
    for i in range(len(residual_N)):
        store(residual_N, i, _ZERO)


@compiled()
def _add_bytes(codes: np.ndarray, scale: np.float32, total: np.ndarray) -> None:
    for i in range(len(total)):
        total[i] += np.float32(np.int8(codes[i])) * scale


@compiled()
def _add_nibbles(codes: np.ndarray, scale: np.float32, total: np.ndarray) -> None:
    for b in range(len(total) // 2):
        total[2 * b] += np.float32(np.int8((codes[b] & 15) ^ 8) - 8) * scale
        total[2 * b + 1] += np.float32(np.int8((codes[b] >> 4) ^ 8) - 8) * scale
    if len(total) % 2:
        total[-1] += np.float32(np.int8((codes[len(total) // 2] & 15) ^ 8) - 8) * scale


@compiled()
def _add_shard(codes_M: np.ndarray, scales_K: np.ndarray, bits: int, block: int, total_N: np.ndarray) -> None:
    """Add one sender's values to the total."""
    for k in range(len(scales_K)):
        total = total_N[k * block : (k + 1) * block]
        if bits == 8:
            _add_bytes(codes_M[k * block :], scales_K[k], total)
        else:
            _add_nibbles(codes_M[k * block // 2 :], scales_K[k], total)


def encode_blocks(
    gradient_WN: Tensor, residual_WN: Tensor, *, decay: float, rank: int, bits: int, block: int
) -> EncodedBlocks:
    """See :func:`tagc.kernels.reference.encode_blocks`. ``own_N`` lies in the gradient's memory.

    Errors: ``ValueError`` for bits other than 8 and 4, and for a block of an odd number of elements with 4 bits: a byte
    would belong to two blocks.
    """
    _check_block(block, bits)
    ranks, numel = gradient_WN.shape
    check_shards(gradient_WN, residual_WN, numel)
    gradient, residual = float_array(gradient_WN, "gradient"), state_array(residual_WN, "residual")
    codes_WM = torch.empty(ranks, code_bytes(numel, bits), dtype=torch.uint8)
    scales_WK = torch.empty(ranks, -(-numel // block), dtype=torch.float32)
    codes, scales = byte_array(codes_WM, "codes"), float_array(scales_WK, "scales")
    factor, limit, squares = np.float32(decay), np.float32(largest_code(bits)), 0.0
    for w in range(ranks):
        if w == rank:  # the owner's own values never travel
            _take_own(gradient[w], residual[w], factor)
            codes[w], scales[w] = 0, 0
        else:
            squares += _encode_shard(gradient[w], residual[w], codes[w], scales[w], factor, limit, bits, block)
    return EncodedBlocks(codes_WM, scales_WK, gradient_WN[rank], torch.tensor(squares))


def decode_blocks(codes_WM: Tensor, scales_WK: Tensor, own_N: Tensor, *, bits: int, block: int) -> Tensor:
    """See :func:`tagc.kernels.reference.decode_blocks`."""
    _check_block(block, bits)
    numel = own_N.numel()
    check_numel(numel)
    codes, scales, total = byte_array(codes_WM, "codes"), float_array(scales_WK, "scales"), float_array(own_N, "own")
    if codes.shape[1] != code_bytes(numel, bits) or scales.shape != (len(codes), -(-numel // block)):
        raise ValueError(f"codes {codes.shape} and scales {scales.shape} do not fit a shard of {numel} elements")
    for codes_M, scales_K in zip(codes, scales, strict=True):
        _add_shard(codes_M, scales_K, bits, block, total)
    return own_N


def _check_block(block: int, bits: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"kernels=cpu encodes gradients in 8 or 4 bits, got {bits}")
    if block < 1 or (bits == 4 and block % 2):
        raise ValueError(f"kernels=cpu needs blocks of an even number of elements, got {block}")
