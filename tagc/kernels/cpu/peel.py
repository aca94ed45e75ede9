"""Decode of the sketch: peel the peers' sum.

A cell that holds one unresolved element gives its value. Every lane is a peeling problem of its own, so a row of lanes
is handled as vectors: count the unresolved elements of every cell by adding rows of flags, then sweep over the rows,
take what any of a row's three cells gives, and subtract it at once, so that later rows of the same sweep see it. Two or
three sweeps resolve nearly all. The rest are followed one by one: whoever is resolved looks for the element that is now
alone in one of its cells, until no cell gives any more. So the work is bounded by the number of elements.

What can be peeled does not depend on the order (the rest is the 2-core of the hypergraph, which is unique), only the
rounding of values does. The reference stops after MAX_ROUNDS rounds, which matters only next to the load that peels at
all (0.850 to 0.857 elements per cell for 60,013 elements in one lane); there this backend resolves more.

Rows of lanes are padded to whole vectors in scratch memory; flags of the padding are zero, so nothing happens there.
Rows of a single element have sweeps of their own (peel_single).
"""

from __future__ import annotations

import numpy as np

from tagc.kernels.cpu.bits import count_bits, count_flags, gather_bits, spread_bits
from tagc.kernels.cpu.compiled import compiled
from tagc.kernels.cpu.peel_single import peel_single
from tagc.kernels.cpu.vectors import VECTOR, find_pure, take_pure

_ZERO = np.float32(0)
TILE = 8192  # elements
SWEEP_SHARE = 200  # sweep again while a sweep resolves at least one in so many elements of the shard


@compiled()
def spread_rows(
    index_B: np.ndarray, own_N: np.ndarray, tile_rows: int, lanes: int, open_RW: np.ndarray
) -> tuple[int, int]:
    """Index to rows of flags (uint8 [R, width], padding zero). Returns the sizes of (the index, its union with own)."""
    numel, tile, width = len(own_N), tile_rows * lanes, open_RW.shape[1]
    words = np.zeros((tile + width) // 8 + 1, np.uint64)
    flags = words.view(np.uint8)
    peers, union = 0, 0
    for start in range(0, numel, tile):
        stop = min(start + tile, numel)
        spread_bits(index_B[start // 8 : (stop + 7) // 8], words)
        flags[stop - start :] = 0
        for r in range((stop - start + lanes - 1) // lanes):
            row, source = open_RW[start // lanes + r], flags[r * lanes : r * lanes + width]
            for lane in range(width):
                row[lane] = source[lane]
            for lane in range(lanes, width):
                row[lane] = 0
        peers += count_flags(words)
        own = own_N[start:stop]
        for i in range(len(own)):
            flags[i] |= own[i] != 0
        union += count_flags(words)
    return peers, union


@compiled()
def pack_rows(open_RW: np.ndarray, tile_rows: int, lanes: int, index_B: np.ndarray) -> int:
    """Invert :func:`spread_rows`; returns how many flags are set."""
    rows, tile = len(open_RW), tile_rows * lanes
    words = np.zeros(tile // 8, np.uint64)
    flags = words.view(np.uint8)
    count = 0
    for first in range(0, rows, tile_rows):
        last = min(first + tile_rows, rows)
        flags[(last - first) * lanes :] = 0
        for r in range(first, last):
            flags[(r - first) * lanes : (r - first + 1) * lanes] = open_RW[r, :lanes]
        out = index_B[first * lanes // 8 : min((first * lanes + tile) // 8, len(index_B))]
        count += gather_bits(words[: len(out)], out)
    return count


@compiled()
def fill_cells(
    cells_S: np.ndarray, open_RW: np.ndarray, cell_HR: np.ndarray, lanes: int, rest: np.ndarray, count: np.ndarray
) -> None:
    """Copy the cells into padded rows (the padding is never used), and count the unresolved elements of each."""
    rest_rows, width = rest.reshape(-1, rest.shape[2]), rest.shape[2]
    for c in range(len(rest_rows)):
        row, source = rest_rows[c], cells_S[c * lanes : c * lanes + width]
        for lane in range(len(source)):
            row[lane] = source[lane]
    count[:] = 0
    for r in range(len(open_RW)):
        flags = open_RW[r]
        for h in range(count.shape[0]):
            row_count = count[h, cell_HR[h, r]]
            for lane in range(width):
                row_count[lane] += flags[lane]


@compiled()
def sweep_rows(
    open_RW: np.ndarray,
    rest: np.ndarray,
    count: np.ndarray,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    lanes: int,
    total_N: np.ndarray,
) -> int:
    """Take, row by row, what pure cells give. Returns how many elements were resolved.

    Rows at the very end, whose padding would lie behind the total, are left out.
    """
    width, cells = open_RW.shape[1], count.shape[1]
    flags, flat_rest, flat_count = open_RW.reshape(-1), rest.reshape(-1), count.reshape(-1)
    resolved = 0
    for r in range((len(total_N) - width) // lanes + 1):
        a = cell_HR[0, r] * width
        b = (cells + cell_HR[1, r]) * width
        c = (2 * cells + cell_HR[2, r]) * width
        sign_a, sign_b, sign_c = sign_HR[0, r], sign_HR[1, r], sign_HR[2, r]
        for lane in range(0, width, VECTOR):
            at = r * width + lane
            pure = find_pure(flags, at, flat_count, a + lane, b + lane, c + lane)
            if pure:
                resolved += count_bits(pure)
                take_pure(
                    pure,
                    flags,
                    at,
                    flat_count,
                    flat_rest,
                    a + lane,
                    b + lane,
                    c + lane,
                    sign_a,
                    sign_b,
                    sign_c,
                    total_N,
                    r * lanes + lane,
                )
    return resolved


@compiled()
def _has_flag(row: np.ndarray) -> bool:
    either = 0
    for lane in range(len(row)):
        either |= row[lane]
    return either != 0


@compiled()
def _take(
    r: int,
    lane: int,
    open_RW: np.ndarray,
    rest: np.ndarray,
    count: np.ndarray,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    stack: np.ndarray,
    top: int,
) -> tuple[bool, np.float32, int]:
    """Resolve one element if a cell of it is pure; put the cells that become pure on the stack.

    Returns (whether it was resolved, its value, the new top of the stack).
    """
    value, pure = _ZERO, False
    for h in range(count.shape[0]):
        c = cell_HR[h, r]
        if count[h, c, lane] == 1:
            value, pure = sign_HR[h, r] * rest[h, c, lane], True
            break
    if not pure:
        return False, value, top
    open_RW[r, lane] = 0
    for h in range(count.shape[0]):
        c = cell_HR[h, r]
        rest[h, c, lane] -= sign_HR[h, r] * value
        count[h, c, lane] -= 1
        if count[h, c, lane] == 1:
            stack[top] = (h * count.shape[1] + c) * count.shape[2] + lane
            top += 1
    return True, value, top


@compiled()
def chase_rest(
    open_RW: np.ndarray,
    rest: np.ndarray,
    count: np.ndarray,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    rows_HCK: np.ndarray,
    lanes: int,
    total_N: np.ndarray,
) -> int:
    """Resolve all that can be, one by one, starting from every unresolved element. Returns how many were.

    A count falls to 1 once, so no cell is on the stack twice and the stack never holds more than all cells.
    """
    rows, width = open_RW.shape
    cells = count.shape[1]
    stack = np.empty(count.size, np.int64)
    resolved = 0
    for first in range(rows):
        if not _has_flag(open_RW[first]):
            continue
        for lane in range(lanes):
            if open_RW[first, lane] == 0:
                continue
            done, value, top = _take(first, lane, open_RW, rest, count, cell_HR, sign_HR, stack, 0)
            if not done:
                continue
            total_N[first * lanes + lane] += value
            resolved += 1
            while top > 0:
                top -= 1
                cell = stack[top] // width  # the lane stays the same: lanes do not mix
                h, c = cell // cells, cell % cells
                if count[h, c, lane] != 1:
                    continue
                for k in range(rows_HCK.shape[2]):
                    r = rows_HCK[h, c, k]
                    if r < rows and open_RW[r, lane] != 0:
                        _, value, top = _take(r, lane, open_RW, rest, count, cell_HR, sign_HR, stack, top)
                        total_N[r * lanes + lane] += value
                        resolved += 1
                        break
    return resolved


@compiled()
def add_estimates(
    open_RW: np.ndarray, rest: np.ndarray, cell_HR: np.ndarray, sign_HR: np.ndarray, lanes: int, total_N: np.ndarray
) -> None:
    """Add the median of its three cells to every unresolved element; NaN if one of them is NaN."""
    for r in range(len(open_RW)):
        for lane in range(lanes):
            if open_RW[r, lane]:
                a = sign_HR[0, r] * rest[0, cell_HR[0, r], lane]
                b = sign_HR[1, r] * rest[1, cell_HR[1, r], lane]
                c = sign_HR[2, r] * rest[2, cell_HR[2, r], lane]
                if a != a or b != b or c != c:
                    total_N[r * lanes + lane] += np.float32(np.nan)
                else:
                    total_N[r * lanes + lane] += max(min(a, b), min(max(a, b), c))


@compiled()
def peel(
    index_B: np.ndarray,
    cells_S: np.ndarray,
    total_N: np.ndarray,
    tile_rows: int,
    lanes: int,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    rows_HCK: np.ndarray,
    estimate: bool,
    open_RW: np.ndarray,
    rest: np.ndarray,
    count: np.ndarray,
    unresolved_B: np.ndarray,
) -> tuple[int, int, int]:
    """Peel one shard into total_N. Returns the sizes of (the union with own, the peers' union, the unresolved)."""
    if lanes == 1:
        union, peers, left, may_go_on = peel_single(index_B, cells_S, total_N, cell_HR, sign_HR, open_RW, rest, count)
    else:
        peers, union = spread_rows(index_B, total_N, tile_rows, lanes, open_RW)
        fill_cells(cells_S, open_RW, cell_HR, lanes, rest, count)
        left, found, may_go_on = peers, peers, True
        while found * SWEEP_SHARE > len(total_N):
            found = sweep_rows(open_RW, rest, count, cell_HR, sign_HR, lanes, total_N)
            left -= found
    if left > 0 and may_go_on:
        left -= chase_rest(open_RW, rest, count, cell_HR, sign_HR, rows_HCK, lanes, total_N)
    if left > 0:
        pack_rows(open_RW, tile_rows, lanes, unresolved_B)
        if estimate:
            add_estimates(open_RW, rest, cell_HR, sign_HR, lanes, total_N)
    else:
        unresolved_B[:] = 0
    return union, peers, left
