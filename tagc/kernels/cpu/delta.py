"""Differences of weights to a replica: one block after another, each small enough for the nearest cache.

Shape letters: W ranks, N elements of one shard, K blocks of B elements, M bytes of codes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tagc.codec.delta import coded_numel
from tagc.codec.quantize import block_count, code_bytes, largest_code
from tagc.codec.rotate import draw_signs
from tagc.kernels.cpu.arrays import as_array, byte_array, check_numel, state_array
from tagc.kernels.cpu.bits import float_from_bits, load, store
from tagc.kernels.cpu.compiled import compiled
from tagc.kernels.reference import EncodedDelta

_ZERO = np.float32(0)
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to an integer, half to even
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_NAN_BITS = np.uint16(0x7FC0)
_NO_SIGNS = np.empty(0, np.float32)


@compiled()
def _subtract(target: np.ndarray, replica: np.ndarray, x: np.ndarray) -> None:
    for i in range(len(target)):
        x[i] = load(target, i) - load(replica, i)


@compiled()
def _find_largest(x: np.ndarray) -> int:
    """Bits of the largest magnitude: without their sign, floats are ordered like their bits, NaN and Inf last."""
    largest = 0
    bits = x.view(np.int32)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & _MAGNITUDE)
    return largest


@compiled()
def _round(x: np.ndarray, scale: np.float32, limit: np.float32, q: np.ndarray) -> None:
    for i in range(len(x)):
        rounded = (x[i] / scale + _ROUNDER) - _ROUNDER
        q[i] = np.int8(np.int32(min(max(rounded, -limit), limit)))


@compiled()
def _transform(x: np.ndarray, factor: np.float32) -> None:
    """Hadamard transform in place, times ``factor``."""
    distance = 1
    while distance < len(x):
        for start in range(0, len(x), 2 * distance):
            low, high = x[start : start + distance], x[start + distance : start + 2 * distance]
            for i in range(distance):
                a, b = low[i], high[i]
                low[i], high[i] = a + b, a - b
        distance *= 2
    for i in range(len(x)):
        x[i] *= factor


@compiled()
def _pack(q: np.ndarray, codes: np.ndarray, bits: int) -> None:
    """q: int8, filled with zeros up to a whole number of bytes of codes; its last bits may lie in the next block."""
    if bits == 8:
        for i in range(len(codes)):
            codes[i] = np.uint8(q[i])
    elif bits == 4:
        for b in range(len(codes)):
            codes[b] = np.uint8((q[2 * b] & 15) | ((q[2 * b + 1] & 15) << 4))
    elif bits == 2:
        for b in range(len(codes)):
            low = (q[4 * b] & 3) | ((q[4 * b + 1] & 3) << 2)
            codes[b] = np.uint8(low | ((q[4 * b + 2] & 3) << 4) | ((q[4 * b + 3] & 3) << 6))
    else:
        for b in range(len(codes)):  # byte b holds bits 8 b to 8 b + 7, which begin in code 8 b // 3
            first = 8 * b // 3
            word = (q[first] & 7) | ((q[first + 1] & 7) << 3) | ((q[first + 2] & 7) << 6) | ((q[first + 3] & 7) << 9)
            codes[b] = np.uint8((word >> (8 * b - 3 * first)) & 255)


@compiled()
def _unpack(codes: np.ndarray, q: np.ndarray, bits: int) -> None:
    """The inverse of :func:`_pack`, as float32."""
    if bits == 8:
        for i in range(len(q)):
            q[i] = np.float32(np.int8(codes[i]))
    elif bits == 4:
        for b in range(len(q) // 2):
            q[2 * b] = np.float32(np.int8((codes[b] & 15) ^ 8) - 8)
            q[2 * b + 1] = np.float32(np.int8((codes[b] >> 4) ^ 8) - 8)
        if len(q) % 2:
            q[-1] = np.float32(np.int8((codes[len(q) // 2] & 15) ^ 8) - 8)
    else:
        mask, half, last = (1 << bits) - 1, 1 << (bits - 1), len(codes) - 1
        for i in range(len(q)):
            byte = i * bits // 8
            word = np.int32(codes[byte]) | (np.int32(codes[min(byte + 1, last)]) << 8)
            q[i] = np.float32((((word >> (i * bits - 8 * byte)) & mask) ^ half) - half)


@compiled()
def _encode(
    target_N: np.ndarray,
    replica_N: np.ndarray,
    signs_B: np.ndarray,
    codes_M: np.ndarray,
    scales_K: np.ndarray,
    limit: np.float32,
    factor: np.float32,
    bits: int,
    block: int,
) -> None:
    x_block, q_block = np.empty(block, np.float32), np.zeros(block + 8, np.int8)
    for k in range(len(scales_K)):
        start, stop = k * block, min((k + 1) * block, len(target_N))
        x = x_block[: stop - start]
        _subtract(target_N[start:stop], replica_N[start:stop], x)
        if len(signs_B):
            x_block[stop - start :] = _ZERO
            x, stop = x_block, start + block
            for i in range(block):
                x[i] *= signs_B[i]
            _transform(x, factor)
        q_block[:] = 0
        largest = _find_largest(x)
        if largest >= _INFINITY:
            scales_K[k] = _NAN_BITS
        else:
            bits_up = (np.int64(np.float32(float_from_bits(largest) / limit).view(np.int32)) + 0xFFFF) & -0x10000
            scales_K[k] = np.uint16(bits_up >> 16)
            scale = float_from_bits(bits_up)
            if scale > 0:
                _round(x, scale, limit, q_block)
        _pack(q_block, codes_M[start * bits // 8 : (stop * bits + 7) // 8], bits)


@compiled()
def _apply(
    codes_M: np.ndarray,
    scales_K: np.ndarray,
    replica_N: np.ndarray,
    signs_B: np.ndarray,
    factor: np.float32,
    bits: int,
    block: int,
) -> None:
    x_block = np.empty(block, np.float32)
    for k in range(len(scales_K)):
        start, stop = k * block, min((k + 1) * block, len(replica_N))
        coded = block if len(signs_B) else stop - start
        x, scale = x_block[:coded], load(scales_K, k)
        _unpack(codes_M[start * bits // 8 : (start * bits + coded * bits + 7) // 8], x, bits)
        for i in range(coded):
            x[i] *= scale
        if len(signs_B):
            _transform(x, factor)
            for i in range(coded):
                x[i] *= signs_B[i]
        replica = replica_N[start:stop]
        for i in range(len(replica)):
            store(replica, i, load(replica, i) + x[i])


def _rotation(block: int, rotate: int | None) -> tuple[np.ndarray, np.float32]:
    return (_NO_SIGNS if rotate is None else draw_signs(block, rotate).numpy()), np.float32(1 / math.sqrt(block))


def _check_block(block: int, bits: int) -> None:
    if block < 8 or block % 8:
        raise ValueError(
            f"kernels=cpu needs blocks of a multiple of 8 elements, so that they end with a byte; got {block}"
        )


def encode_delta(
    target_N: Tensor, replica_N: Tensor, *, bits: int, block: int, rotate: int | None = None
) -> EncodedDelta:
    """See :func:`tagc.kernels.reference.encode_delta`. Errors: ``ValueError`` for blocks of no whole bytes."""
    _check_block(block, bits)
    numel = target_N.numel()
    check_numel(numel)
    if replica_N.shape != target_N.shape:
        raise ValueError(f"target {tuple(target_N.shape)} and replica {tuple(replica_N.shape)} differ in shape")
    codes_M = torch.empty(code_bytes(coded_numel(numel, block, rotate), bits), dtype=torch.uint8)
    scales_K = torch.empty(block_count(numel, block), dtype=torch.bfloat16)
    signs, factor = _rotation(block, rotate)
    _encode(
        *(state_array(target_N, "target"), state_array(replica_N, "replica"), signs),
        *(byte_array(codes_M, "codes"), as_array(scales_K, "scales", torch.bfloat16)),
        *(np.float32(largest_code(bits)), factor, bits, block),
    )
    return EncodedDelta(codes_M, scales_K)


def apply_delta(
    codes_WM: Tensor, scales_WK: Tensor, replica_WN: Tensor, *, bits: int, block: int, rotate: int | None = None
) -> None:
    """See :func:`tagc.kernels.reference.apply_delta`."""
    _check_block(block, bits)
    ranks, numel = replica_WN.shape
    check_numel(numel)
    sizes = (code_bytes(coded_numel(numel, block, rotate), bits), block_count(numel, block))
    if codes_WM.shape != (ranks, sizes[0]) or scales_WK.shape != (ranks, sizes[1]):
        shapes = f"codes {tuple(codes_WM.shape)} and scales {tuple(scales_WK.shape)}"
        raise ValueError(f"{shapes} do not fit replicas of {numel} elements on {ranks} ranks: {sizes} a rank")
    codes, scales = byte_array(codes_WM, "codes"), as_array(scales_WK, "scales", torch.bfloat16)
    replica, (signs, factor) = state_array(replica_WN, "replica"), _rotation(block, rotate)
    for w in range(ranks):
        _apply(codes[w], scales[w], replica[w], signs, factor, bits, block)
