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

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tagc.codec.sizes import HASH_ROWS
from tagc.codec.sizes import LANES as LANES
from tagc.codec.sizes import MIN_CELLS_PER_LANE as MIN_CELLS_PER_LANE
from tagc.codec.sizes import SketchLayout as SketchLayout
from tagc.codec.sizes import plan_layout as plan_layout

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
