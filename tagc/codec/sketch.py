"""The count sketch (LHC, arXiv 2402.07529): three hash rows, three signs; linear, so sketches of ranks add up."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec.hashing import HASH_ROWS, HashTable, SketchLayout


def arrange_rows(values: Tensor, layout: SketchLayout) -> Tensor:
    """Lay the elements out as ``row x lane``, zero-filled: [..., N] -> [..., R, L]."""
    padding = layout.rows * layout.lanes - layout.numel
    return torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (layout.rows, layout.lanes))


def sketch_values(values: Tensor, layout: SketchLayout, table: HashTable) -> Tensor:
    """Sketch every shard in ``values``: cell (h, c, l) is the sum of ``sign * value`` over the rows that hash to c.

    values: float32 [..., N]. Returns float32 [..., 3, C, L]. Cost: 3 N reads per shard. Host syncs: none.
    Exactness: the sum order is fixed by the table, so the result is deterministic; sketch(a) + sketch(b) equals
    sketch(a + b) up to rounding.

    >>> from tagc.codec.hashing import build_hash_table, plan_layout
    >>> layout = plan_layout(4, 1.0)
    >>> table = build_hash_table(layout.rows, layout.cells, 0, torch.device("cpu"))
    >>> sketch_values(torch.tensor([0.0, 2.0, 0.0, 0.0]), layout, table).abs().sum(dim=(1, 2)).tolist()
    [2.0, 2.0, 2.0]
    """
    value_RL = arrange_rows(values, layout)
    sketch = value_RL.new_zeros(*value_RL.shape[:-2], HASH_ROWS, layout.cells, layout.lanes)
    for h in range(HASH_ROWS):
        signed = torch.nn.functional.pad(value_RL * table.sign_HR[h, :, None], (0, 0, 0, 1))  # row R reads as zero
        for rows_C in table.rows_HCK[h].unbind(dim=1):
            sketch[..., h, :, :] += signed.index_select(-2, rows_C)
    return sketch
