"""Peeling where a row is one element: shards too small, or sketches too much smaller than their shard, for more lanes.

Vectors over lanes do not help here, and flags for all elements are mostly zero. So the unresolved positions are kept
as a list, in order; each sweep takes what pure cells give and closes the gaps. The cells fit the nearest caches.
"""

from __future__ import annotations

import numpy as np

from tagc.kernels.cpu.bits import count_bits, first_bit
from tagc.kernels.cpu.compiled import compiled

MAX_SWEEPS = 40  # afterwards elements are followed one by one, which bounds the work
_ONE = np.uint64(1)


@compiled()
def list_positions(index_B: np.ndarray, numel: int) -> np.ndarray:
    """Positions below ``numel`` whose bits are set: int64, ascending."""
    total = 0
    for b in range(len(index_B)):
        total += count_bits(np.int64(index_B[b]))
    position_E, found = np.empty(total, np.int64), 0
    for b in range(len(index_B)):
        byte = np.uint64(index_B[b])
        while byte:
            at = 8 * b + np.int64(first_bit(byte))
            byte &= byte - _ONE
            if at < numel:
                position_E[found] = at
                found += 1
    return position_E[:found]


@compiled()
def _sweep_list(
    position_E: np.ndarray,
    rest: np.ndarray,
    count: np.ndarray,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    cells: int,
    total_N: np.ndarray,
) -> int:
    """Take what pure cells give, the first of an element's three; returns how many positions are left, at the front."""
    left = 0
    for e in range(len(position_E)):
        i = position_E[e]
        a, b, c = cell_HR[0, i], cells + cell_HR[1, i], 2 * cells + cell_HR[2, i]
        if count[a] == 1:
            value = sign_HR[0, i] * rest[a]
        elif count[b] == 1:
            value = sign_HR[1, i] * rest[b]
        elif count[c] == 1:
            value = sign_HR[2, i] * rest[c]
        else:
            position_E[left] = i
            left += 1
            continue
        rest[a] -= sign_HR[0, i] * value
        rest[b] -= sign_HR[1, i] * value
        rest[c] -= sign_HR[2, i] * value
        count[a] -= 1
        count[b] -= 1
        count[c] -= 1
        total_N[i] += value
    return left


@compiled()
def peel_single(
    index_B: np.ndarray,
    cells_S: np.ndarray,
    total_N: np.ndarray,
    cell_HR: np.ndarray,
    sign_HR: np.ndarray,
    open_RW: np.ndarray,
    rest: np.ndarray,
    count: np.ndarray,
) -> tuple[int, int, int, bool]:
    """Sweep one shard until nothing is left, or nothing moves, or too often.

    open_RW, rest and count: out, as :mod:`tagc.kernels.cpu.peel` keeps them; open_RW only if something is left. Returns
    (union with own, peers' union, left, whether more may be resolved).
    """
    position_E = list_positions(index_B, len(total_N))
    peers, union = len(position_E), 0
    for i in range(len(total_N)):
        union += total_N[i] != 0
    flat_rest, flat_count, cells = rest.reshape(-1), count.reshape(-1), count.shape[1]
    flat_rest[:] = cells_S
    flat_count[:] = 0
    for e in range(peers):
        i = position_E[e]
        union += total_N[i] == 0
        for h in range(count.shape[0]):
            flat_count[h * cells + cell_HR[h, i]] += 1
    left, before, sweeps = peers, peers + 1, 0
    while 0 < left < before and sweeps < MAX_SWEEPS:
        before = left
        left = _sweep_list(position_E[:left], flat_rest, flat_count, cell_HR, sign_HR, cells, total_N)
        sweeps += 1
    if left > 0:
        open_RW[:] = 0
        for e in range(left):
            open_RW[position_E[e], 0] = 1
    return union, peers, left, left < before
