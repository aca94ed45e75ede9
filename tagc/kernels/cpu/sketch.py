"""Encode of the sketch: one pass over gradient and state, tile by tile.

A tile is selected into scratch memory that stays in the cache, then each of its rows is added to its three cell rows:
contiguous vectors of ``lanes`` floats. The cells (twice the cache of a core at 2.4 M elements and ratio 2) are
accumulated in fp32 with rows padded to whole vectors. A tile row is read a few elements past its end; what is read
there only reaches the padding. Sums run in order of position.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.codec.hashing import HashTable, SketchLayout
from tagc.kernels.cpu.arrays import (
    byte_array,
    check_layout,
    check_shards,
    float_array,
    pad_lanes,
    rows_per_tile,
    state_array,
    threshold_array,
)
from tagc.kernels.cpu.bits import prefetch, spread_bits, store
from tagc.kernels.cpu.compiled import compiled
from tagc.kernels.cpu.peel import peel
from tagc.kernels.cpu.select import add_owed, copy_values, select_tile
from tagc.kernels.reference import DecodedSketch, EncodedSketch

TILE = 8192  # elements: 32 kB each of gradient, state and selected values
LINE = 16  # floats in a cache line


@compiled()
def _scatter_rows(
    chosen: np.ndarray,
    first: int,
    rows: int,
    lanes: int,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    cells: np.ndarray,
    gradient_N: np.ndarray,
    carry_N: np.ndarray,
) -> None:
    """Add ``rows`` rows of a tile, the first of which is row ``first`` of the shard, to their cells.

    Meanwhile the next tile of gradient_N and carry_N is asked for: else memory would be idle here.
    """
    width, last = cells.shape[2], cell_HR.shape[1] - 1
    flat = cells.reshape(-1)
    for r in range(first, first + rows):
        start = (r + rows) * lanes
        for i in range(start, min(start + lanes, len(gradient_N)), LINE):
            prefetch(gradient_N, i)
            prefetch(carry_N, i)
        row = chosen[(r - first) * lanes : (r - first) * lanes + width]
        for h in range(cells.shape[0]):  # the next row's cells are on their way while this one's are added
            start = (h * cells.shape[1] + cell_HR[h, min(r + 1, last)]) * width
            for lane in range(start, start + width, LINE):
                prefetch(flat, lane)
        for h in range(cells.shape[0]):
            sign = sign_HR[h, r]
            out = cells[h, cell_HR[h, r]]
            for lane in range(width):
                out[lane] += sign * row[lane]


@compiled()
def _scatter_single_lane(
    chosen: np.ndarray, first: int, rows: int, cell_HR: np.ndarray, sign_HR: np.ndarray, cells: np.ndarray
) -> None:
    """:func:`_scatter_rows` where a row is one element."""
    for r in range(rows):
        if chosen[r] != 0:
            for h in range(cells.shape[0]):
                cells[h, cell_HR[h, first + r], 0] += sign_HR[h, first + r] * chosen[r]


@compiled()
def _encode_shard(
    gradient_N: np.ndarray,
    carry_N: np.ndarray,
    owed_B: np.ndarray,
    index_B: np.ndarray,
    threshold: np.float32,
    decay: np.float32,
    error_feedback: bool,
    is_own: bool,
    tile_rows: int,
    lanes: int,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    cells: np.ndarray,
) -> tuple[int, float]:
    """Encode one shard; the own one is left, selected, in the gradient's memory. Returns (selected, squares)."""
    numel, tile = len(gradient_N), tile_rows * lanes
    chosen = np.zeros(tile + cells.shape[2], np.float32)
    words = np.empty((tile + 7) // 8, np.uint64)
    total, squares = 0, 0.0
    if not is_own:
        cells[:] = 0
    for start in range(0, numel, tile):
        stop = min(start + tile, numel)
        first_byte, last_byte = start // 8, (stop + 7) // 8
        sent, tile_squares = select_tile(
            gradient_N[start:stop],
            carry_N[start:stop],
            owed_B[first_byte:last_byte],
            index_B[first_byte:last_byte],
            decay,
            threshold,
            error_feedback,
            chosen,
            words,
        )
        total += sent
        squares += float(tile_squares)
        if is_own:
            copy_values(chosen, gradient_N[start:stop])
            continue
        rows = (stop - start + lanes - 1) // lanes
        if stop == numel:
            chosen[stop - start :] = 0  # the last row may be short
        if lanes == 1:
            _scatter_single_lane(chosen, start, rows, cell_HR, sign_HR, cells)
        else:
            _scatter_rows(chosen, start // lanes, rows, lanes, cell_HR, sign_HR, cells, gradient_N, carry_N)
    return total, squares


@compiled()
def _round_cells(cells: np.ndarray, lanes: int, cells_S: np.ndarray) -> None:
    """Drop the padding of the cells and round them to the wire dtype."""
    flat = cells.reshape(-1, cells.shape[2])
    for c in range(len(flat)):
        row, out = flat[c], cells_S[c * lanes : (c + 1) * lanes]
        for lane in range(lanes):
            store(out, lane, row[lane])


@compiled()
def _add_residual(gradient_N: np.ndarray, carry_N: np.ndarray, owed_B: np.ndarray, decay: np.float32) -> None:
    words = np.empty(512, np.uint64)
    flags = words.view(np.uint8)
    for start in range(0, len(gradient_N), len(flags)):
        stop = min(start + len(flags), len(gradient_N))
        bits = owed_B[start // 8 : (stop + 7) // 8]
        spread_bits(bits, words)
        add_owed(gradient_N[start:stop], carry_N[start:stop], flags[: stop - start], decay)


def add_residual(gradient_WN: Tensor, carry_WN: Tensor, owed_WB: Tensor, decay: float) -> Tensor:
    """See :func:`tagc.kernels.reference.add_residual`."""
    check_shards(gradient_WN, carry_WN, gradient_WN.shape[-1])
    gradient, carry = float_array(gradient_WN, "gradient"), state_array(carry_WN, "residual")
    owed = byte_array(owed_WB, "owed")
    for w in range(len(gradient)):
        _add_residual(gradient[w], carry[w], owed[w], np.float32(decay))
    return gradient_WN


def encode_sketch(
    gradient_WN: Tensor,
    carry_WN: Tensor,
    owed_WB: Tensor,
    threshold_W1: Tensor,
    *,
    decay: float,
    rank: int,
    layout: SketchLayout,
    table: HashTable,
    wire_dtype: torch.dtype,
    error_feedback: bool,
) -> EncodedSketch:
    """See :func:`tagc.kernels.reference.encode_sketch`. ``own_N`` lies in the gradient's memory.

    Exactness: masks and state bitwise; cells are summed in order of position.
    """
    check_layout(layout, table)
    check_shards(gradient_WN, carry_WN, layout.numel)
    ranks = len(gradient_WN)
    gradient, carry = float_array(gradient_WN, "gradient"), state_array(carry_WN, "residual")
    owed, threshold = byte_array(owed_WB, "owed"), threshold_array(threshold_W1, ranks)
    index_WB = torch.empty(ranks, bitmap_bytes(layout.numel), dtype=torch.uint8)
    cells_WS = torch.empty(ranks, layout.sketch_numel, dtype=wire_dtype)
    index, cells_out = byte_array(index_WB, "index"), state_array(cells_WS, "cells")
    cell_HR, sign_HR = table.cell_HR.numpy(), table.sign_HR.numpy()
    cells = np.empty((len(cell_HR), layout.cells, pad_lanes(layout.lanes)), np.float32)
    kept, squares = [], 0.0
    for w in range(ranks):
        sent, shard_squares = _encode_shard(
            gradient[w],
            carry[w],
            owed[w],
            index[w],
            threshold[w],
            np.float32(decay),
            error_feedback,
            w == rank,
            rows_per_tile(layout.lanes, TILE),
            layout.lanes,
            cell_HR,
            sign_HR,
            cells,
        )
        kept.append(sent)
        squares += shard_squares
        if w == rank:  # the owner's own values never travel
            index[w], cells_out[w] = 0, 0
        else:
            _round_cells(cells, layout.lanes, cells_out[w])
    return EncodedSketch(index_WB, cells_WS, gradient_WN[rank], torch.tensor(kept), torch.tensor(squares))


def decode_sketch(
    index_B: Tensor, cells_S: Tensor, own_N: Tensor, *, layout: SketchLayout, table: HashTable, estimate: bool
) -> DecodedSketch:
    """See :func:`tagc.kernels.reference.decode_sketch`, and :mod:`tagc.kernels.cpu.peel` for the method.

    Exactness: masks bitwise (near the peeling threshold, where the reference runs out of rounds, more is resolved);
    values up to the rounding of the subtractions.
    """
    check_layout(layout, table)
    if own_N.shape != (layout.numel,) or cells_S.numel() != layout.sketch_numel:
        raise ValueError(f"{layout} does not fit {own_N.shape[0]} elements and {cells_S.numel()} cells")
    index, cells = byte_array(index_B, "index"), float_array(cells_S, "cells").reshape(-1)
    total = float_array(own_N, "own")
    width = pad_lanes(layout.lanes)
    cell_HR, sign_HR, rows_HCK = table.cell_HR.numpy(), table.sign_HR.numpy(), table.rows_HCK.numpy()
    unresolved_B = torch.empty_like(index_B)
    union, peers_union, unresolved = peel(
        index,
        cells,
        total,
        rows_per_tile(layout.lanes, TILE),
        layout.lanes,
        cell_HR,
        sign_HR,
        rows_HCK,
        estimate,
        np.empty((layout.rows, width), np.uint8),
        np.empty((len(cell_HR), layout.cells, width), np.float32),
        np.empty((len(cell_HR), layout.cells, width), np.uint8),
        byte_array(unresolved_B, "unresolved"),
    )
    return DecodedSketch(own_N, torch.tensor(union), torch.tensor(peers_union), unresolved_B, torch.tensor(unresolved))
