"""How large things are on the wire, in closed form: an index, a sketch, a packed message, codes and their scales.

Integers in, integers out: torch is not imported, so that what only counts bytes starts at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HASH_ROWS = 3
LANES = (1, 7, 13, 31, 61, 127, 251)
# Fewer cells per independent peeling problem leave stuck elements at loads that an infinite problem would peel.
MIN_CELLS_PER_LANE = 6144
HEADROOM = 0.95  # of a sketch's largest load, so that the union may vary a little from step to step
GRID = 8  # ratios are powers of 2^(1/8), so that few different tables are built
BITS = (8, 4, 3, 2)
SCALE_BYTES = 2  # of a difference's block: bfloat16
MAX_NUMEL = 2**31 - 1  # positions are int32


def _check_countable(numel: int) -> None:
    if numel > MAX_NUMEL:
        raise ValueError(f"{numel} elements in one shard are more than an int32 can count; shard over more ranks")


def bitmap_bytes(numel: int) -> int:
    """Bytes of the index of ``numel`` elements."""
    return (numel + 7) // 8


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
    _check_countable(numel)
    lanes = max(count for count in LANES if count == 1 or numel / ratio >= count * MIN_CELLS_PER_LANE)
    rows = -(-numel // lanes)
    cells = max(1, math.ceil(rows / (HASH_ROWS * ratio)))
    return SketchLayout(numel, lanes, rows, cells)


def expected_union(numel: int, density: float, ranks: int) -> float:
    """Elements of a shard of ``numel`` that any of the owner's ``ranks - 1`` peers selects, if each selects ``density``
    of them independently (real unions are smaller).
    """
    return (1 - (1 - density) ** (ranks - 1)) * numel


def fit_layout(numel: int, union: float, max_load: float) -> SketchLayout:
    """The smallest sketch of the grid of ratios that holds ``union`` elements a little below ``max_load``."""
    ratio = HEADROOM * max_load * numel / max(1.0, union)
    return plan_layout(numel, 2 ** (math.floor(GRID * math.log2(min(ratio, 64.0))) / GRID))


def plan_capacity(numel: int, density: float, slack: float) -> int:
    """Values in the message of a shard of ``numel`` elements: ``ceil(density * slack * numel)``, at most ``numel``.

    Errors: ``ValueError`` for an empty shard or more elements than an int32 can count.

    >>> plan_capacity(1000, 0.25, 1.1), plan_capacity(1000, 1.0, 1.1), plan_capacity(1, 0.01, 1.0)
    (275, 1000, 1)
    """
    if numel < 1:
        raise ValueError(f"a packed message needs at least one element, got {numel}")
    _check_countable(numel)
    return min(numel, math.ceil(density * slack * numel))


def code_bytes(numel: int, bits: int) -> int:
    """M, bytes of the codes of ``numel`` elements. Errors: ``ValueError`` unless bits is 8, 4, 3 or 2."""
    if bits not in BITS:
        raise ValueError(f"bits={bits} is not supported; choose 8, 4, 3 or 2")
    return bitmap_bytes(numel * bits)


def block_count(numel: int, block: int) -> int:
    """K, scales of ``numel`` elements. Errors: ``ValueError`` for more elements than an int32 can count."""
    _check_countable(numel)
    return -(-numel // block)


def coded_numel(numel: int, block: int, rotate: int | None) -> int:
    """Codes that ``numel`` elements take: a rotated block is sent whole, as its padding is no longer zero."""
    return numel if rotate is None else block_count(numel, block) * block


def delta_bytes(numel: int, bits: int, block: int, rotate: int | None = None) -> int:
    """Bytes of one shard's codes and scales."""
    return code_bytes(coded_numel(numel, block, rotate), bits) + block_count(numel, block) * SCALE_BYTES
