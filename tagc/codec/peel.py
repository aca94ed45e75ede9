"""Recover values from a sum of sketches and the union of their indices, by peeling.

A cell hit by exactly one unresolved element holds that element's value. Take it, subtract it from the element's other
two cells, repeat. Three partitioned hash rows peel up to 0.818 elements per cell (a random 3-uniform hypergraph's
2-core threshold); the rounds needed grow as the load nears it: 6 at 0.5, 12 at 0.7, 23 at 0.78.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tagc.codec.hashing import HASH_ROWS, HashTable, SketchLayout

MAX_ROUNDS = 40


class Peeled(NamedTuple):
    """What peeling recovered, in order of position."""

    position_E: Tensor  # int64 [E]: positions of the union
    value_E: Tensor  # float32 [E]: recovered values; the median estimate where unresolved
    resolved_E: Tensor  # bool [E]


def peel_sketch(sketch: Tensor, union_N: Tensor, layout: SketchLayout, table: HashTable) -> Peeled:
    """Peel one shard.

    sketch: float32 [3, C, L], the sum over ranks; not changed. union_N: bool [N]. Values that peeling cannot
    separate within MAX_ROUNDS get the median of their three cells (after all resolved elements were subtracted) and
    ``resolved_E`` false: the caller chooses between that estimate (LHC) and returning them to their senders.
    Cost: O(E) index operations in all, since only unresolved elements are touched again. Host syncs: one per round
    (this is the readable backend; on a CPU they are free). Exactness: bounded by the rounding of the subtractions;
    deterministic.

    >>> from tagc.codec.hashing import build_hash_table, plan_layout
    >>> from tagc.codec.sketch import sketch_values
    >>> layout = plan_layout(8, 2.0)
    >>> table = build_hash_table(layout.rows, layout.cells, 1, torch.device("cpu"))
    >>> x = torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    >>> peeled = peel_sketch(sketch_values(x, layout, table), x != 0, layout, table)
    >>> peeled.position_E.tolist(), peeled.value_E.tolist(), peeled.resolved_E.tolist()
    ([1], [3.0], [True])
    """
    position_E = union_N.nonzero().squeeze(1)
    row_E, lane_E = position_E // layout.lanes, position_E % layout.lanes
    block = torch.arange(HASH_ROWS, device=sketch.device)[:, None] * layout.cells
    cell_HE = (block + table.cell_HR[:, row_E]) * layout.lanes + lane_E
    sign_HE = table.sign_HR[:, row_E]

    rest = sketch.flatten().clone()
    count = torch.bincount(cell_HE.flatten(), minlength=rest.numel())
    value_E = rest.new_zeros(position_E.shape)
    resolved_E = torch.zeros_like(position_E, dtype=torch.bool)
    open_O = torch.arange(position_E.numel(), device=sketch.device)  # indices into E of what is unresolved
    for _ in range(MAX_ROUNDS):
        pure_HO = count[cell_HE[:, open_O]] == 1
        found_O = pure_HO.any(dim=0)
        if not found_O.any():
            break
        done = open_O[found_O]
        hash_row = pure_HO[:, found_O].to(torch.uint8).argmax(dim=0)  # the first hash row with a pure cell
        value = rest[cell_HE[hash_row, done]] * sign_HE[hash_row, done]
        value_E[done], resolved_E[done] = value, True
        open_O = open_O[~found_O]
        for h in range(HASH_ROWS):
            rest.index_add_(0, cell_HE[h, done], -sign_HE[h, done] * value)
            count.index_add_(0, cell_HE[h, done], count.new_full((1,), -1).expand(done.numel()))
    value_E[open_O] = (rest[cell_HE[:, open_O]] * sign_HE[:, open_O]).median(dim=0).values
    return Peeled(position_E, value_E, resolved_E)
