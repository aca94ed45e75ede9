"""Private kernels of the sketch's encoder. Launched by sketch.py.

Shape letters: W ranks, N elements of one shard, B = ceil(N/8) bytes, R rows and L lanes of a shard, H = 3 hash rows,
C cells per hash row, K rows per cell, S = 3 C L cells of a shard.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tagc.kernels.triton.parts import add_old, narrow, pack_mask, read_bits, widen


@triton.jit
def add_owed(gradient_ptr, carry_ptr, owed_ptr, decay, numel, index_bytes, TILE: tl.constexpr):
    """gradient_WN += decay * carry where owed. Grid: (tiles, W). Each program writes its own tile only."""
    base, w = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    local = tl.arange(0, TILE)
    inside = local < numel - base
    at = w * numel + base + local
    owed = read_bits(owed_ptr + w * index_bytes + base // 8, local, inside)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    carry = widen(tl.load(carry_ptr + at, mask=inside, other=0.0))
    tl.store(gradient_ptr + at, add_old(gradient, tl.where(owed != 0, carry, 0.0), decay), mask=inside)


@triton.jit
def select_sketch(
    gradient_ptr,
    carry_ptr,
    owed_ptr,
    threshold_ptr,
    index_ptr,
    own_ptr,
    kept_ptr,
    squares_ptr,
    decay,
    rank,
    numel,
    index_bytes,
    threshold_stride,
    HAS_DECAY: tl.constexpr,
    STORE_X: tl.constexpr,
    ERROR_FEEDBACK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the residual, select, keep the rest: reads gradient and state once, writes state, index and own values.

    Grid: (tiles, W). STORE_X: leave the sum in gradient_WN too, for the sketch, where the carry is not stored in
    fp32. kept_WT (int32) and squares_WT (float32) get a partial result per tile. No races: TILE is a multiple of 8, so
    every element and every byte is read and written by one program alone; inside it, the barrier keeps a thread from
    writing a byte of ``owed`` that another thread has yet to read.
    """
    tile, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tile * TILE
    local = tl.arange(0, TILE)
    inside = local < numel - base
    at = w * numel + base + local
    bytes_at = w * index_bytes + base // 8
    x = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    if HAS_DECAY:
        owed = read_bits(owed_ptr + bytes_at, local, inside)
        carry = widen(tl.load(carry_ptr + at, mask=inside, other=0.0))
        x = add_old(x, tl.where(owed != 0, carry, 0.0), decay)
    selected = (tl.abs(x) >= tl.load(threshold_ptr + w * threshold_stride)) & (x != 0)
    tl.debug_barrier()

    tl.store(carry_ptr + at, narrow(x, carry_ptr.dtype.element_ty), mask=inside)
    if STORE_X:
        tl.store(gradient_ptr + at, x, mask=inside)
    byte = tl.arange(0, TILE // 8)
    byte_inside = byte < index_bytes - base // 8
    rest = inside & (selected == 0) & ERROR_FEEDBACK
    tl.store(owed_ptr + bytes_at + byte, pack_mask(rest, TILE), mask=byte_inside)
    tl.store(index_ptr + bytes_at + byte, pack_mask(selected & (w != rank), TILE), mask=byte_inside)
    if w == rank:
        tl.store(own_ptr + base + local, tl.where(selected, x, 0.0), mask=inside)
    rest_x = tl.where(rest, x, 0.0)
    partial = w * tl.num_programs(0) + tile
    tl.store(kept_ptr + partial, tl.sum(selected.to(tl.int32)))
    tl.store(squares_ptr + partial, tl.sum(rest_x * rest_x))


@triton.jit
def gather_cells(
    x_ptr,
    threshold_ptr,
    rows_ptr,
    sign_ptr,
    cells_ptr,
    rank,
    numel,
    rows,
    cells,
    depth,
    threshold_stride,
    LANES: tl.constexpr,
    LANE_TILE: tl.constexpr,
    CELL_TILE: tl.constexpr,
):
    """cells_WS: each cell is the sum of the selected, signed values of its rows, in the table's order, in fp32.

    Grid: (tiles of cells, H, W). A value is selected by the same comparison that made the index, so no bit is read.
    The own row becomes zero. x_WN is only read and a program writes its own cells: no atomics, no races.
    """
    h, w = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    cell = tl.program_id(0) * CELL_TILE + tl.arange(0, CELL_TILE)
    lane = tl.arange(0, LANE_TILE)
    threshold = tl.load(threshold_ptr + w * threshold_stride)
    held_ptr = rows_ptr + (h * cells + cell) * depth
    total = tl.zeros((CELL_TILE, LANE_TILE), dtype=tl.float32)
    for k in range(tl.where(w == rank, 0, depth)):
        row = tl.load(held_ptr + k, mask=cell < cells, other=rows)  # `rows` stands for no row
        sign = tl.load(sign_ptr + h * rows + row, mask=row < rows, other=0.0)
        room = tl.minimum(numel - row * LANES, LANES)[:, None]  # lanes of the row that hold an element
        x = tl.load(x_ptr + w * numel + (row * LANES)[:, None] + lane[None, :], mask=lane[None, :] < room, other=0.0)
        selected = (tl.abs(x) >= threshold) & (x != 0)
        total += tl.where(selected, x, 0.0) * sign[:, None]
    at = ((w * 3 + h) * cells + cell)[:, None] * LANES + lane[None, :]
    inside = (cell < cells)[:, None] & (lane < LANES)[None, :]
    tl.store(cells_ptr + at, narrow(total, cells_ptr.dtype.element_ty), mask=inside)
