"""Packed values: compress the selected elements of a tile to its front, and the inverse.

Both run without branches on the values: every element is written to the next free place, and the place moves on only if
the element is sent. A branch per element would be mispredicted at every fourth one.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.kernels.cpu.arrays import (
    byte_array,
    check_numel,
    check_shards,
    float_array,
    state_array,
    threshold_array,
)
from tagc.kernels.cpu.bits import count_flags, fused_multiply_add, gather_bits, load, round_trip, spread_bits, store
from tagc.kernels.cpu.select import copy_values
from tagc.kernels.reference import DecodedPacked, EncodedPacked

TILE = 4096  # elements; a multiple of 8
_ZERO = np.float32(0)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _split_tile(
    gradient: np.ndarray,
    residual: np.ndarray,
    flags: np.ndarray,
    decay: np.float32,
    threshold: np.float32,
    error_feedback: bool,
    is_own: bool,
    values_C: np.ndarray,
    chosen: np.ndarray,
) -> np.float32:
    """Select from ``x = gradient + decay * residual``; flags: out, what is selected; chosen: out, x where selected.

    residual: out, the rounding of what is selected to the type of values_C (zero for the own shard), and what is not.
    Returns its squares, summed in any order. ``decay=0`` ignores the old residual.
    """
    squares = _ZERO
    for i in range(len(gradient)):
        old = load(residual, i) if decay != 0 else _ZERO
        x = fused_multiply_add(decay, old, gradient[i])
        send = (abs(x) >= threshold) & (x != 0)
        flags[i] = send
        chosen[i] = x if send else _ZERO
        rounding = _ZERO if is_own else x - round_trip(values_C, x)
        kept = x if error_feedback else _ZERO
        rest = rounding if send else kept
        store(residual, i, rest)
        squares += rest * rest
    return squares


@njit(nogil=True, cache=True)
def _compress(chosen: np.ndarray, flags: np.ndarray, packed: np.ndarray) -> int:
    """Move the flagged elements to the front of ``packed``, as long as ``chosen``; returns their number."""
    place = np.uint64(0)
    for i in range(len(chosen)):
        packed[place] = chosen[i]
        place += np.uint64(flags[i])
    return int(np.int64(place))


@njit(nogil=True, cache=True)
def _keep_overflow(chosen: np.ndarray, flags: np.ndarray, room: int, residual: np.ndarray) -> float:
    """Take back what is flagged beyond the first ``room``; returns by how much that changes the residual's squares."""
    change = 0.0
    for i in range(len(chosen)):
        if flags[i]:
            if room > 0:
                room -= 1
            else:
                flags[i] = 0
                x = np.float64(chosen[i])
                rounding = np.float64(load(residual, i))
                change += x * x - rounding * rounding
                store(residual, i, chosen[i])
    return change


@njit(nogil=True, cache=True)
def _encode_shard(
    gradient_N: np.ndarray,
    residual_N: np.ndarray,
    index_B: np.ndarray,
    values_C: np.ndarray,
    threshold: np.float32,
    decay: np.float32,
    error_feedback: bool,
    is_own: bool,
) -> tuple[int, float]:
    """Encode one shard; the own one is left, selected, in the gradient's memory. Returns (sent or applied, squares)."""
    numel, capacity = len(gradient_N), len(values_C)
    words = np.empty(TILE // 8, np.uint64)
    flags = words.view(np.uint8)
    chosen, packed = np.empty(TILE, np.float32), np.empty(TILE + 1, np.float32)
    total, squares = 0, 0.0
    for start in range(0, numel, TILE):
        size = min(TILE, numel - start)
        count = (size + 7) // 8
        tile_residual, tile_chosen = residual_N[start : start + size], chosen[:size]
        flags[size:] = 0
        tile_squares = _split_tile(
            gradient_N[start : start + size],
            tile_residual,
            flags[:size],
            decay,
            threshold,
            error_feedback,
            is_own,
            values_C,
            tile_chosen,
        )
        squares += float(tile_squares)
        if is_own:
            copy_values(chosen, gradient_N[start : start + size])
            total += count_flags(words[:count])
            continue
        sent = _compress(tile_chosen, flags[:size], packed)
        if sent > capacity - total:
            squares += _keep_overflow(tile_chosen, flags[:size], capacity - total, tile_residual)
            sent = capacity - total
        gather_bits(words[:count], index_B[start // 8 : start // 8 + count])
        out = values_C[total : total + sent]
        for k in range(sent):
            store(out, k, packed[k])
        total += sent
    if is_own:
        index_B[:] = 0
        values_C[:] = 0
    else:
        values_C[total:] = 0
    return total, squares


@njit(nogil=True, cache=True)
def _add_values(index_B: np.ndarray, values_C: np.ndarray, total_N: np.ndarray, union_B: np.ndarray) -> None:
    """Add one sender's values to the total, and its index to the union."""
    numel, capacity = len(total_N), len(values_C)
    words = np.zeros(TILE // 8, np.uint64)
    flags = words.view(np.uint8)
    values = np.zeros(TILE + 1, np.float32)
    taken = 0
    for start in range(0, numel, TILE):
        out = total_N[start : start + TILE]
        first, last = start // 8, (start + len(out) + 7) // 8
        spread_bits(index_B[first:last], words)
        for b in range(first, last):
            union_B[b] |= index_B[b]
        here = count_flags(words[: last - first])
        stop = min(here, capacity - taken)
        for k in range(stop):
            values[k] = load(values_C, taken + k)
        values[stop : here + 1] = 0  # an index with more bits than values adds zeros
        place = np.uint64(0)
        for i in range(len(out)):
            value = values[place]
            out[i] += value if flags[i] else _ZERO
            place += np.uint64(flags[i])
        taken += stop


@njit(nogil=True, cache=True)
def _mark_nonzero(own_N: np.ndarray, union_B: np.ndarray) -> None:
    words = np.empty(TILE // 8, np.uint64)
    flags = words.view(np.uint8)
    for start in range(0, len(own_N), TILE):
        own = own_N[start : start + TILE]
        flags[len(own) :] = 0
        for i in range(len(own)):
            flags[i] = own[i] != 0
        count = (len(own) + 7) // 8
        gather_bits(words[:count], union_B[start // 8 : start // 8 + count])


@njit(nogil=True, cache=True)
def _count_bitmap(bits_B: np.ndarray) -> int:
    words = np.empty(TILE // 8, np.uint64)
    count = 0
    for start in range(0, len(bits_B), len(words)):
        part = bits_B[start : start + len(words)]
        spread_bits(part, words)
        count += count_flags(words[: len(part)])
    return count


def encode_packed(
    gradient_WN: Tensor,
    residual_WN: Tensor,
    threshold_W1: Tensor,
    *,
    decay: float,
    rank: int,
    capacity: int,
    wire_dtype: torch.dtype,
    error_feedback: bool,
) -> EncodedPacked:
    """See :func:`tagc.kernels.reference.encode_packed`. ``own_N`` lies in the gradient's memory."""
    ranks, numel = gradient_WN.shape
    check_shards(gradient_WN, residual_WN, numel)
    gradient, residual = float_array(gradient_WN, "gradient"), state_array(residual_WN, "residual")
    threshold = threshold_array(threshold_W1, ranks)
    index_WB = torch.empty(ranks, bitmap_bytes(numel), dtype=torch.uint8)
    values_WC = torch.empty(ranks, capacity, dtype=wire_dtype)
    index, values = byte_array(index_WB, "index"), state_array(values_WC, "values")
    kept, squares = [], 0.0
    for w in range(ranks):
        sent, shard_squares = _encode_shard(
            gradient[w],
            residual[w],
            index[w],
            values[w],
            threshold[w],
            np.float32(decay),
            error_feedback,
            w == rank,
        )
        kept.append(sent)
        squares += shard_squares
    return EncodedPacked(index_WB, values_WC, gradient_WN[rank], torch.tensor(kept), torch.tensor(squares))


def decode_packed(index_WB: Tensor, values_WC: Tensor, own_N: Tensor) -> DecodedPacked:
    """See :func:`tagc.kernels.reference.decode_packed`."""
    check_numel(own_N.numel())
    total, index = float_array(own_N, "own"), byte_array(index_WB, "index")
    values = state_array(values_WC, "values")
    if index.shape[1] != bitmap_bytes(own_N.numel()) or len(values) != len(index):
        raise ValueError(
            f"index {index.shape} and values {values.shape} do not fit a shard of {own_N.numel()} elements"
        )
    union = np.empty(index.shape[1], np.uint8)
    _mark_nonzero(total, union)
    for index_B, values_C in zip(index, values, strict=True):
        _add_values(index_B, values_C, total, union)
    return DecodedPacked(own_N, torch.tensor(_count_bitmap(union)))
