"""The sketch against a cell-by-cell oracle; linearity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.codec.hashing import HASH_ROWS, build_hash_table, plan_layout
from tagc.codec.sketch import sketch_values
from tests.codec.common import DENSITIES, SIZES, make_values

CPU = torch.device("cpu")


def sketch_by_hand(values, layout, table):
    sketch = torch.zeros(HASH_ROWS, layout.cells, layout.lanes, dtype=torch.float64)
    for i in values.nonzero().flatten().tolist():
        row, lane = divmod(i, layout.lanes)
        for h in range(HASH_ROWS):
            sketch[h, table.cell_HR[h, row], lane] += table.sign_HR[h, row].item() * values[i].item()
    return sketch


@pytest.mark.parametrize("numel", SIZES[:-1])
@pytest.mark.parametrize("density", DENSITIES)
def test_sketch_matches_the_oracle(numel, density):
    layout = plan_layout(numel, 2.0)
    table = build_hash_table(layout.rows, layout.cells, 3, CPU)
    values = make_values(numel, density)
    expected = sketch_by_hand(values, layout, table)
    torch.testing.assert_close(sketch_values(values, layout, table).double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30_000), st.floats(0.5, 8.0), st.integers(0, 1000))
def test_sketches_add_up(numel, ratio, seed):
    """sketch(a) + sketch(b) = sketch(a + b): exact on integers, which fp32 adds without rounding."""
    layout = plan_layout(numel, ratio)
    table = build_hash_table(layout.rows, layout.cells, seed, CPU)
    a, b = (make_values(numel, 0.5, seed + i).mul(100).round() for i in range(2))
    total = sketch_values(a, layout, table) + sketch_values(b, layout, table)
    assert torch.equal(total, sketch_values(a + b, layout, table))


def test_shards_are_sketched_independently():
    layout = plan_layout(257, 2.0)
    table = build_hash_table(layout.rows, layout.cells, 0, CPU)
    values = torch.stack([make_values(257, 1.0, seed) for seed in range(3)])
    together = sketch_values(values, layout, table)
    for row, sketch in zip(values, together, strict=True):
        assert torch.equal(sketch_values(row, layout, table), sketch)
