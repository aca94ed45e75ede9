"""Packed values: compress the selected elements of a tile to its front, and the inverse.

Both walk over the set bits of 64 elements at a time: one mispredicted branch per word. (A loop over all elements that
writes each to the next free place and moves on only behind what is sent has no such branch, and takes three times as
long at a density of 0.2.)
"""

from __future__ import annotations

import numpy as np
import torch
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
from tagc.kernels.cpu.bits import (
    count_flags,
    first_bit,
    fused_multiply_add,
    gather_bits,
    load,
    round_trip,
    spread_bits,
    store,
)
from tagc.kernels.cpu.compiled import compiled
from tagc.kernels.cpu.select import copy_values
from tagc.kernels.reference import DecodedPacked, EncodedPacked

TILE = 4096  # elements; a multiple of 8
_ZERO, _ONE = np.float32(0), np.uint64(1)


@compiled(fastmath={"reassoc"})
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


@compiled()
def _compress(chosen: np.ndarray, bits: np.ndarray, values_C: np.ndarray, place: int) -> int:
    """Append the elements whose bits are set to the values, from ``place`` on; returns the place behind them."""
    to = np.uint64(place)
    for b in range(len(bits)):
        word, base = bits[b], np.uint64(64 * b)
        while word:
            store(values_C, to, chosen[base + first_bit(word)])
            to += _ONE
            word &= word - _ONE
    return int(np.int64(to))


@compiled()
def _expand(values_C: np.ndarray, place: int, bits: np.ndarray, total: np.ndarray) -> int:
    """Add the values from ``place`` on to the elements whose bits are set; returns the place behind them."""
    at, end = np.uint64(place), np.uint64(len(values_C))
    for b in range(len(bits)):
        word, base = bits[b], np.uint64(64 * b)
        while word and at < end:  # an index with more bits than values adds nothing
            total[base + first_bit(word)] += load(values_C, at)
            at += _ONE
            word &= word - _ONE
    return int(np.int64(at))


@compiled()
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


@compiled()
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
    tile_words = np.empty(TILE // 64, np.uint64)
    tile_bytes = tile_words.view(np.uint8)
    chosen = np.empty(TILE, np.float32)
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
        if total + count_flags(words[:count]) > capacity:
            squares += _keep_overflow(tile_chosen, flags[:size], capacity - total, tile_residual)
        gather_bits(words[:count], tile_bytes)
        tile_bytes[count:] = 0
        copy_values(tile_bytes, index_B[start // 8 : start // 8 + count])
        total = _compress(tile_chosen, tile_words[: (size + 63) // 64], values_C, total)
    if is_own:
        index_B[:] = 0
        values_C[:] = 0
    else:
        values_C[total:] = 0
    return total, squares


@compiled()
def _add_values(index_B: np.ndarray, values_C: np.ndarray, total_N: np.ndarray, union_B: np.ndarray) -> None:
    """Add one sender's values to the total, and its index to the union."""
    words = np.zeros(TILE // 64, np.uint64)
    tile_bytes = words.view(np.uint8)
    taken = 0
    for start in range(0, len(total_N), TILE):
        total = total_N[start : start + TILE]
        index, union = index_B[start // 8 : (start + TILE) // 8], union_B[start // 8 : (start + TILE) // 8]
        copy_values(index, tile_bytes[: len(index)])
        tile_bytes[len(index) :] = 0
        if len(total) % 64:  # bits behind the last element, which no encoder sets, must not reach other memory
            words[len(total) // 64] &= (_ONE << np.uint64(len(total) % 64)) - _ONE
        taken = _expand(values_C, taken, words, total)
        for b in range(len(index)):
            union[b] |= index[b]


@compiled()
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


@compiled()
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
