"""Private kernels of packed values. Launched by packed.py.

Shape letters: W ranks, N elements of one shard, B = ceil(N/8) bytes, T tiles of a shard, C capacity of a message.

A value's place in the message is the number of values sent before it: the sum over earlier tiles (a scan of T counts
between two launches) and, inside the tile, a scan in the program. Every program writes its own tile and its own run of
places in the message, so there are no races and no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tagc.kernels.triton.parts import add_old, count_bits, narrow, pack_mask, read_bits, widen


@triton.jit
def select_packed(
    gradient_ptr,
    residual_ptr,
    threshold_ptr,
    index_ptr,
    own_ptr,
    count_ptr,
    squares_ptr,
    decay,
    rank,
    numel,
    index_bytes,
    threshold_stride,
    HAS_DECAY: tl.constexpr,
    ERROR_FEEDBACK: tl.constexpr,
    WIRE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the residual and select; write residual, index and own values as if the message had room for all.

    Grid: (tiles, W). The selected values of a tile are left, packed, at the start of the tile's own gradient memory,
    from where :func:`place_packed` takes them once their places are known: the barrier lets every thread of the block
    read its gradients before another overwrites them. count_WT (int32), squares_WT (float32): per tile.
    """
    tile, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tile * TILE
    local = tl.arange(0, TILE)
    inside = local < numel - base
    at = w * numel + base + local
    x = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    if HAS_DECAY:
        x = add_old(x, widen(tl.load(residual_ptr + at, mask=inside, other=0.0)), decay)
    selected = (tl.abs(x) >= tl.load(threshold_ptr + w * threshold_stride)) & (x != 0)
    order = tl.cumsum(selected.to(tl.int32), axis=0)
    tl.debug_barrier()

    rest = x - widen(narrow(x, WIRE))
    if w == rank:
        rest = tl.zeros_like(x)
        tl.store(own_ptr + base + local, tl.where(selected, x, 0.0), mask=inside)
    else:
        tl.store(gradient_ptr + at - local + order - 1, x, mask=selected)
    rest = tl.where(selected, rest, x if ERROR_FEEDBACK else 0.0)
    rest = tl.where(inside, rest, 0.0)
    tl.store(residual_ptr + at, narrow(rest, residual_ptr.dtype.element_ty), mask=inside)
    byte = tl.arange(0, TILE // 8)
    packed = pack_mask(selected & (w != rank), TILE)
    tl.store(index_ptr + w * index_bytes + base // 8 + byte, packed, mask=byte < index_bytes - base // 8)
    partial = w * tl.num_programs(0) + tile
    tl.store(count_ptr + partial, tl.sum(selected.to(tl.int32)))
    tl.store(squares_ptr + partial, tl.sum(rest * rest))


@triton.jit
def place_packed(
    gradient_ptr,
    residual_ptr,
    index_ptr,
    count_ptr,
    end_ptr,
    squares_ptr,
    values_ptr,
    rank,
    numel,
    index_bytes,
    capacity,
    TILE: tl.constexpr,
):
    """Copy each tile's packed values to their places; what finds no room is unsent: its bit goes, its value stays.

    Grid: (tiles, W). end_WT: int64, values up to and including each tile; values_WC: zero before. A tile in which
    nothing overflows costs its selected values only. The barrier lets all threads read the index and the partial sum
    before one of them writes.
    """
    tile, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    base = tile * TILE
    local = tl.arange(0, TILE)
    partial = w * tl.num_programs(0) + tile
    count, end = tl.load(count_ptr + partial), tl.load(end_ptr + partial)
    if w != rank:
        at = w * numel + base
        room = tl.minimum(capacity - (end - count), TILE).to(tl.int32)  # at most 0 behind the last place
        values_at = w * capacity + (end - count)
        for start in range(0, tl.minimum(count, room), TILE // 4):  # most tiles send a quarter or less
            place = start + tl.arange(0, TILE // 4)
            placed = place < tl.minimum(count, room)
            x = tl.load(gradient_ptr + at + place, mask=placed, other=0.0)
            tl.store(values_ptr + values_at + place, narrow(x, values_ptr.dtype.element_ty), mask=placed)
        if count > room:
            bytes_at = w * index_bytes + base // 8
            selected = read_bits(index_ptr + bytes_at, local, local < numel - base)
            order = tl.cumsum(selected, axis=0) - 1
            lost = (selected != 0) & (order >= room)
            x = tl.load(gradient_ptr + at + order, mask=lost, other=0.0)
            squares = tl.load(squares_ptr + partial)
            tl.debug_barrier()
            tl.store(residual_ptr + at + local, narrow(x, residual_ptr.dtype.element_ty), mask=lost)
            byte = tl.arange(0, TILE // 8)
            packed = pack_mask((selected != 0) & (order < room), TILE)
            tl.store(index_ptr + bytes_at + byte, packed, mask=byte < index_bytes - base // 8)
            counted = x - widen(narrow(x, values_ptr.dtype.element_ty))  # in the sum already, as if it were sent
            tl.store(squares_ptr + partial, squares + tl.sum(x * x - counted * counted))


@triton.jit
def count_index(index_ptr, count_ptr, index_bytes, BYTES: tl.constexpr):
    """count_WT: set bits of every tile of BYTES bytes. Grid: (tiles, W)."""
    tile, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    byte = tl.arange(0, BYTES)
    inside = byte < index_bytes - tile * BYTES
    bits = tl.load(index_ptr + w * index_bytes + tile * BYTES + byte, mask=inside, other=0).to(tl.int32)
    tl.store(count_ptr + w * tl.num_programs(0) + tile, tl.sum(count_bits(bits)))


@triton.jit
def add_packed(
    index_ptr,
    values_ptr,
    own_ptr,
    count_ptr,
    end_ptr,
    union_ptr,
    ranks,
    numel,
    index_bytes,
    capacity,
    TILE: tl.constexpr,
):
    """own_N += the values of ranks 0 to W - 1, in that order; union_T: int32, positions with any value. Grid: (T,)."""
    tile = tl.program_id(0)
    base = tile * TILE
    local = tl.arange(0, TILE)
    inside = local < numel - base
    total = tl.load(own_ptr + base + local, mask=inside, other=0.0)
    union = total != 0
    tiles = tl.num_programs(0)
    for _ in range(ranks):  # pointers move from row to row, in 64 bits
        sent = read_bits(index_ptr + base // 8, local, inside)
        first = tl.load(end_ptr + tile) - tl.load(count_ptr + tile)
        place = first + tl.cumsum(sent, axis=0) - 1
        held = (sent != 0) & (place < capacity)  # a sender sets no more bits; a damaged index must not read beyond
        total += widen(tl.load(values_ptr + place, mask=held, other=0.0))
        union = union | (sent != 0)
        index_ptr += index_bytes
        values_ptr += capacity
        count_ptr += tiles
        end_ptr += tiles
    tl.store(own_ptr + base + local, total, mask=inside)
    tl.store(union_ptr + tile, tl.sum(union.to(tl.int32)))
