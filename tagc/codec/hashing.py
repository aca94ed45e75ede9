"""Partitioned hash rows over ``row x lane``.

An element's position ``i`` is row ``i // L``, lane ``i % L``. Only the row is hashed, so every access is a contiguous
vector of L lanes, and every lane is a peeling problem of its own. L is a prime that divides no common model width:
some columns of a gradient matrix are much larger than others, and with a power of two each column would stay in one
lane and overload it; so every column passes through all lanes. Each of the three hash rows has its own cells
("partitioned"), so two picks of one element can never coincide. Within a hash row the rows are dealt to the cells
evenly in pseudo-random order, so every cell holds floor(R/C) or ceil(R/C) rows and the inverse map is a rectangular
table: a sketch is a sum of K gathers, without atomics, in a fixed order.

The tables are integers computed on the CPU from a seed, the same on every backend and machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

HASH_ROWS = 3
LANES = (1, 7, 13, 31, 61, 127, 251)
# Fewer cells per independent peeling problem leave stuck elements at loads that an infinite problem would peel.
MIN_CELLS_PER_LANE = 6144

_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64, as signed int64


def mix64(keys: Tensor) -> Tensor:
    """Scramble int64 keys with the splitmix64 finaliser (a bijection on 64-bit words). Exactness: bitwise.

    >>> mix64(torch.tensor([0, 1])).tolist()
    [-2152535657050944081, -7995527694508729151]
    """
    increment, first, second = _MULTIPLIERS
    keys = keys + increment
    keys = (keys ^ ((keys >> 30) & ((1 << 34) - 1))) * first
    keys = (keys ^ ((keys >> 27) & ((1 << 37) - 1))) * second
    return keys ^ ((keys >> 31) & ((1 << 33) - 1))


@dataclass(frozen=True)
class SketchLayout:
    """How the N elements of a shard lie in rows, lanes and cells."""

    numel: int  # N, elements of one shard, >= 1
    lanes: int  # L
    rows: int  # R = ceil(N / L)
    cells: int  # C, cells per hash row and lane

    @property
    def sketch_numel(self) -> int:
        """Cells of one shard's sketch over all hash rows and lanes."""
        return HASH_ROWS * self.cells * self.lanes


def plan_layout(numel: int, ratio: float) -> SketchLayout:
    """Choose lanes and cells for ``numel`` elements at ``ratio`` elements per cell.

    As many lanes (of LANES) as leave MIN_CELLS_PER_LANE cells in each. Errors: ``ValueError``
    for an empty shard, a ratio that is not positive, or more elements than an int32 can count.

    >>> plan_layout(100_000, 2.0)
    SketchLayout(numel=100000, lanes=7, rows=14286, cells=2381)
    """
    if numel < 1 or not ratio > 0:
        raise ValueError(f"a sketch needs at least one element and a ratio > 0, got {numel} elements, ratio {ratio}")
    if numel > torch.iinfo(torch.int32).max:
        raise ValueError(f"{numel} elements in one shard are more than an int32 can count; shard over more ranks")
    lanes = max(count for count in LANES if count == 1 or numel / ratio >= count * MIN_CELLS_PER_LANE)
    rows = -(-numel // lanes)
    cells = max(1, math.ceil(rows / (HASH_ROWS * ratio)))
    return SketchLayout(numel, lanes, rows, cells)


@dataclass(frozen=True)
class HashTable:
    """Where each row goes, and which rows a cell holds."""

    cell_HR: Tensor  # int64 [3, R]: cell of row r in hash row h, in [0, C)
    sign_HR: Tensor  # float32 [3, R]: +1 or -1
    rows_HCK: Tensor  # int64 [3, C, K]: rows in each cell, filled up with R (one past the last row)


@lru_cache(maxsize=256)
def build_hash_table(rows: int, cells: int, seed: int, device: torch.device) -> HashTable:
    """Deal ``rows`` rows to ``cells`` cells in each hash row. Deterministic in (rows, cells, seed); cached.

    Cost: three sorts of R keys on the CPU. Host syncs: one copy to the device when the table is built.
    """
    row = torch.arange(rows, dtype=torch.int64)
    depth = -(-rows // cells)
    cell_HR = torch.empty(HASH_ROWS, rows, dtype=torch.int64)
    rows_HCK = torch.full((HASH_ROWS, depth * cells), rows, dtype=torch.int64)
    sign_HR = torch.empty(HASH_ROWS, rows)
    for h in range(HASH_ROWS):
        keys = mix64(row ^ mix64(torch.tensor(seed * HASH_ROWS + h)))
        order = torch.argsort(keys, stable=True)
        cell_HR[h, order] = row % cells  # the i-th row in key order goes to cell i mod C
        rows_HCK[h, :rows] = order
        sign_HR[h] = 1.0 - 2.0 * (mix64(keys) & 1).to(torch.float32)
    rows_HCK = rows_HCK.view(HASH_ROWS, depth, cells).transpose(1, 2).contiguous()
    return HashTable(cell_HR.to(device), sign_HR.to(device), rows_HCK.to(device))
