"""Private kernels of the sketch's decoder. Launched by peel.py.

Shape letters: N elements of a shard, R rows and L lanes of a shard, P bytes per row, C cells per hash row, K rows per
cell. A cell's flat number is f = h * C + c.

Bits of the lanes of a row are kept together, P bytes per row, so that one byte operation looks at eight independent
peeling problems. Rounds are synchronous, the reference's: cells are judged by the state before the round, then
elements are taken. An element is taken once, when all others of a pure cell are known; so its value is computed once,
by gathering those, and no cell is ever written: no atomics, and a result that does not depend on the order of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tagc.kernels.triton.parts import count_bits, pack_mask, read_bits
from tagc.kernels.triton.peel_parts import mark_pure, peel_tile, subtract_known


@triton.jit
def spread_index(
    index_ptr, peers_ptr, open_ptr, numel, rows, LANES: tl.constexpr, ROW_BYTES: tl.constexpr, ROW_TILE: tl.constexpr
):
    """Lay an index out by rows: peers_RP, and open_RP as a copy of it. Grid: (tiles of rows,)."""
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE).to(tl.int64)[:, None]
    byte = tl.arange(0, ROW_BYTES)[None, :]
    first = row * LANES + byte * 8
    width = tl.minimum(tl.minimum(LANES - byte * 8, numel - first), 8)  # bits in this byte, at most 0 behind the end
    inside = (row < rows) & (width > 0)
    low = tl.load(index_ptr + (first >> 3), mask=inside, other=0).to(tl.int32)
    has_next = inside & ((first >> 3) < ((numel - 1) >> 3))
    high = tl.load(index_ptr + (first >> 3) + 1, mask=has_next, other=0).to(tl.int32)
    bits = ((low | (high << 8)) >> (first & 7).to(tl.int32)) & ((1 << tl.maximum(width, 0).to(tl.int32)) - 1)
    at = row * ROW_BYTES + byte
    tl.store(peers_ptr + at, bits.to(tl.uint8), mask=row < rows)
    tl.store(open_ptr + at, bits.to(tl.uint8), mask=row < rows)


@triton.jit
def find_pure(open_ptr, rows_ptr, pure_ptr, rows, all_cells, depth, WORDS: tl.constexpr, CELL_TILE: tl.constexpr):
    """First half of a round, for all cells. Grid: (tiles of cells,). Reads open, writes its own rows of pure."""
    flat = tl.program_id(0) * CELL_TILE + tl.arange(0, CELL_TILE)
    mark_pure(open_ptr, rows_ptr, pure_ptr, flat, tl.arange(0, WORDS), rows, all_cells, depth, WORDS)


@triton.jit
def peel_rows(
    cells_ptr, cell_ptr, rows_ptr, sign_ptr, pure_ptr, peers_ptr, open_ptr, value_ptr, rows, cells, depth,
    LANES: tl.constexpr, ROW_BYTES: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    """Second half of a round, for all rows. Grid: (tiles of rows,). See :func:`peel_tile`."""
    row = tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    byte = tl.arange(0, ROW_BYTES)
    peel_tile(
        cells_ptr, cell_ptr, rows_ptr, sign_ptr, pure_ptr, peers_ptr, open_ptr, value_ptr, row, byte, rows, cells,
        depth, LANES, ROW_BYTES,
    )  # fmt: skip


@triton.jit
def peel_columns(
    cells_ptr, cell_ptr, rows_ptr, sign_ptr, pure_ptr, peers_ptr, open_ptr, value_ptr, rows, cells, depth, max_rounds,
    LANES: tl.constexpr, ROW_BYTES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The last rounds, which few problems need: a program ends its byte of lanes alone. Grid: (P,).

    Lanes are independent, so no program needs another's result and a program stops when a round takes nothing. Inside
    a program each half-round reads what its other threads wrote in the one before. The barriers make that sound: a
    block-wide barrier orders the global writes before it ahead of the reads behind it for all threads of the block,
    and a block runs on one multiprocessor, whose L1 cache its own writes keep up to date. Triton neither caches such
    loads in registers nor moves them over stores or a barrier.
    """
    column = tl.program_id(0) + tl.arange(0, 1)
    found = 0
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE).to(tl.int64)
        left = tl.load(open_ptr + row * ROW_BYTES + tl.program_id(0), mask=row < rows, other=0)
        found = tl.maximum(found, tl.max(left.to(tl.int32), axis=0))
    done = 0
    while (found > 0) & (done < max_rounds):
        for start in range(0, 3 * cells, TILE):
            flat = start + tl.arange(0, TILE)
            mark_pure(open_ptr, rows_ptr, pure_ptr, flat, column, rows, 3 * cells, depth, ROW_BYTES)
        tl.debug_barrier()
        found = 0
        for start in range(0, rows, TILE):
            row = start + tl.arange(0, TILE).to(tl.int64)
            taken = peel_tile(
                cells_ptr, cell_ptr, rows_ptr, sign_ptr, pure_ptr, peers_ptr, open_ptr, value_ptr, row, column, rows,
                cells, depth, LANES, ROW_BYTES,
            )  # fmt: skip
            found = tl.maximum(found, taken)
        tl.debug_barrier()
        done += 1


@triton.jit
def estimate_rows(
    cells_ptr, cell_ptr, rows_ptr, sign_ptr, peers_ptr, open_ptr, value_ptr, rows, cells, depth,
    LANES: tl.constexpr, ROW_BYTES: tl.constexpr, ROW_TILE: tl.constexpr,
):  # fmt: skip
    """Values of unresolved elements: the median of their three cells, less all that is known.

    Grid: as peel_rows. Values are read where resolved and written where not, so no thread reads what another writes.
    """
    row = tl.program_id(0).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    byte = tl.arange(0, ROW_BYTES)
    at = (row * ROW_BYTES)[:, None] + byte[None, :]
    inside = (row < rows)[:, None] & (byte < ROW_BYTES)[None, :]
    todo = tl.load(open_ptr + at, mask=inside, other=0).to(tl.int32)
    for _ in range(tl.max(tl.max(count_bits(todo), axis=1), axis=0)):
        bit = todo & -todo
        active = bit != 0
        lane = byte[None, :] * 8 + count_bits(tl.maximum(bit - 1, 0))
        low = tl.zeros(at.shape, dtype=tl.float32)
        high = low
        median = low
        for h in tl.static_range(3):
            flat = tl.load(cell_ptr + h * rows + row, mask=row < rows, other=0)[:, None] + h * cells
            rest = subtract_known(
                cells_ptr, rows_ptr, sign_ptr, peers_ptr, open_ptr, value_ptr, tl.broadcast_to(flat, at.shape), h,
                row[:, None], byte[None, :], bit, lane, active, rows, depth, LANES, ROW_BYTES, True,
            )  # fmt: skip
            rest *= tl.load(sign_ptr + h * rows + row, mask=row < rows, other=0.0)[:, None]
            if h == 0:
                low = rest
            elif h == 1:
                high = tl.maximum(low, rest)
                low = tl.minimum(low, rest)
            else:
                median = tl.maximum(low, tl.minimum(high, rest))
        tl.store(value_ptr + (row * LANES)[:, None] + lane, median, mask=active)
        todo = todo & (todo - 1)


@triton.jit
def finish_peeling(
    index_ptr, own_ptr, open_ptr, value_ptr, unresolved_ptr, count_ptr, numel, index_bytes,
    LANES: tl.constexpr, ROW_BYTES: tl.constexpr, ESTIMATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """own_N += value where known (or estimated), the index of the unresolved, and counts per tile. Grid: (T,).

    count_3T: int32 [3, T], elements in the union of all ranks, in that of the peers, and unresolved.
    """
    tile = tl.program_id(0)
    base = tile * TILE
    local = tl.arange(0, TILE)
    inside = local < numel - base
    peers = read_bits(index_ptr + base // 8, local, inside) != 0
    position = base.to(tl.int64) + local
    row = position // LANES
    lane = (position - row * LANES).to(tl.int32)
    byte = tl.load(open_ptr + row * ROW_BYTES + (lane >> 3), mask=peers, other=0).to(tl.int32)
    unresolved = ((byte >> (lane & 7)) & 1) != 0
    own = tl.load(own_ptr + position, mask=inside, other=0.0)
    added = peers if ESTIMATE else peers & (unresolved == 0)
    value = tl.load(value_ptr + position, mask=added, other=0.0)
    tl.store(own_ptr + position, own + value, mask=inside)
    out = tl.arange(0, TILE // 8)
    tl.store(unresolved_ptr + base // 8 + out, pack_mask(unresolved, TILE), mask=out < index_bytes - base // 8)
    tiles = tl.num_programs(0)
    tl.store(count_ptr + tile, tl.sum((peers | (own != 0)).to(tl.int32)))
    tl.store(count_ptr + tiles + tile, tl.sum(peers.to(tl.int32)))
    tl.store(count_ptr + 2 * tiles + tile, tl.sum(unresolved.to(tl.int32)))
