"""Pieces of the kernels in peel_kernels.py, which explains them. Same shape letters.

``rows_ptr`` is rows_HCK, ``cell_ptr`` cell_HR and ``sign_ptr`` sign_HR of a hash table; bits are uint8 [., P].
"""

from __future__ import annotations

import triton
import triton.language as tl

from tagc.kernels.triton.parts import count_bits


@triton.jit
def mark_pure(open_ptr, rows_ptr, pure_ptr, flat, word, rows, all_cells, depth, WORDS: tl.constexpr):
    """pure[f]: lanes in which exactly one unresolved element hits cell f, for the words given of its row of bits."""
    ones = tl.zeros((flat.shape[0], word.shape[0]), dtype=open_ptr.dtype.element_ty)
    twos = ones
    inside = flat < all_cells
    for k in range(depth):
        row = tl.load(rows_ptr + flat.to(tl.int64) * depth + k, mask=inside, other=rows)  # `rows` stands for no row
        bits = tl.load(open_ptr + (row * WORDS)[:, None] + word[None, :], mask=(row < rows)[:, None], other=0)
        twos = twos | (ones & bits)
        ones = ones | bits
    at = (flat.to(tl.int64) * WORDS)[:, None] + word[None, :]
    tl.store(pure_ptr + at, ones & ~twos, mask=inside[:, None])


@triton.jit
def subtract_known(
    cells_ptr, rows_ptr, sign_ptr, peers_ptr, open_ptr, value_ptr, flat, hash_row, row, byte, bit, lane, active,
    rows, depth, LANES: tl.constexpr, ROW_BYTES: tl.constexpr, SKIP_OPEN: tl.constexpr,
):  # fmt: skip
    """What a cell holds, less all known values of other rows: float32, for one element per entry of the tile.

    Without SKIP_OPEN every other element of the cell counts as known: the cell is pure.
    """
    rest = tl.load(cells_ptr + flat * LANES + lane, mask=active, other=0.0)
    for k in range(depth):
        other = tl.load(rows_ptr + flat * depth + k, mask=active, other=rows)
        fellow = active & (other < rows) & (other != row)
        known = tl.load(peers_ptr + other * ROW_BYTES + byte, mask=fellow, other=0).to(tl.int32)
        if SKIP_OPEN:
            known = known & ~tl.load(open_ptr + other * ROW_BYTES + byte, mask=fellow, other=0).to(tl.int32)
        fellow = (known & bit) != 0
        value = tl.load(value_ptr + other * LANES + lane, mask=fellow, other=0.0)
        rest -= tl.load(sign_ptr + hash_row * rows + other, mask=fellow, other=0.0) * value
    return rest


@triton.jit
def peel_tile(
    cells_ptr, cell_ptr, rows_ptr, sign_ptr, pure_ptr, peers_ptr, open_ptr, value_ptr, row, byte, rows, cells, depth,
    LANES: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Take the elements of a tile of rows and bytes that a pure cell gives away; returns how many one byte gave.

    Every thread holds bytes and takes their elements one after another, so that lanes without an element cost nothing.
    Only the tile's own bits and values are written; values of other rows are read where they were taken in an earlier
    round (a pure cell holds no other unresolved element), so no thread reads what another writes. The barrier keeps a
    thread from writing bits that a replica of its tile has yet to read.
    """
    inside = (row < rows)[:, None] & (byte < ROW_BYTES)[None, :]
    at = (row * ROW_BYTES)[:, None] + byte[None, :]
    left = tl.load(open_ptr + at, mask=inside, other=0).to(tl.int32)
    most = tl.max(tl.max(left, axis=1), axis=0)
    if most > 0:
        flat0 = tl.load(cell_ptr + row, mask=row < rows, other=0)
        flat1 = tl.load(cell_ptr + rows + row, mask=row < rows, other=0) + cells
        flat2 = tl.load(cell_ptr + 2 * rows + row, mask=row < rows, other=0) + 2 * cells
        pure0 = tl.load(pure_ptr + (flat0 * ROW_BYTES)[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
        pure1 = tl.load(pure_ptr + (flat1 * ROW_BYTES)[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
        pure2 = tl.load(pure_ptr + (flat2 * ROW_BYTES)[:, None] + byte[None, :], mask=inside, other=0).to(tl.int32)
        found = left & (pure0 | pure1 | pure2)
        most = tl.max(tl.max(count_bits(found), axis=1), axis=0)
        todo = found
        for _ in range(most):
            bit = todo & -todo
            active = bit != 0
            lane = byte[None, :] * 8 + count_bits(tl.maximum(bit - 1, 0))
            hash_row = tl.where((pure0 & bit) != 0, 0, tl.where((pure1 & bit) != 0, 1, 2))
            flat = tl.where(hash_row == 0, flat0[:, None], tl.where(hash_row == 1, flat1[:, None], flat2[:, None]))
            rest = subtract_known(
                cells_ptr, rows_ptr, sign_ptr, peers_ptr, open_ptr, value_ptr, flat, hash_row, row[:, None],
                byte[None, :], bit, lane, active, rows, depth, LANES, ROW_BYTES, False,
            )  # fmt: skip
            sign = tl.load(sign_ptr + hash_row.to(tl.int64) * rows + row[:, None], mask=active, other=0.0)
            tl.store(value_ptr + (row * LANES)[:, None] + lane, rest * sign, mask=active)
            todo = todo & (todo - 1)
        tl.debug_barrier()
        tl.store(open_ptr + at, (left & ~found).to(tl.uint8), mask=inside)
    return most
