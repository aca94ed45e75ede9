"""The tables: integers that every backend and machine must agree on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.codec.hashing import HASH_ROWS, LANES, MIN_CELLS_PER_LANE, build_hash_table, mix64, plan_layout

CPU = torch.device("cpu")


def splitmix64(z: int) -> int:
    """The published finaliser in Python's unbounded integers."""
    mask = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.integers(-(2**63), 2**63 - 1))
def test_mix64_matches_the_published_constants(key):
    expected = splitmix64(key & ((1 << 64) - 1))
    assert mix64(torch.tensor([key])).item() & ((1 << 64) - 1) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.integers(1, 200), st.integers(0, 2**31))
def test_table_and_inverse_agree_and_cells_are_even(rows, cells, seed):
    table = build_hash_table(rows, cells, seed, CPU)
    assert set(table.sign_HR.unique().tolist()) <= {-1.0, 1.0}
    for h in range(HASH_ROWS):
        members = [[r for r in cell if r < rows] for cell in table.rows_HCK[h].tolist()]
        assert sorted(r for cell in members for r in cell) == list(range(rows))
        for c, cell in enumerate(members):
            assert all(table.cell_HR[h, r] == c for r in cell)
            assert rows // cells <= len(cell) <= -(-rows // cells)


def test_hash_rows_and_seeds_differ():
    first, second = build_hash_table(1000, 300, 1, CPU), build_hash_table(1000, 300, 2, CPU)
    assert not torch.equal(first.cell_HR[0], first.cell_HR[1])
    assert not torch.equal(first.cell_HR[0], second.cell_HR[0])
    assert abs(first.sign_HR.mean()) < 0.1


@given(st.integers(1, 10**9), st.floats(0.05, 64))
def test_layout_has_room_for_every_element_at_the_ratio(numel, ratio):
    layout = plan_layout(numel, ratio)
    assert layout.rows * layout.lanes >= numel > (layout.rows - 1) * layout.lanes
    assert layout.sketch_numel * ratio >= numel
    assert layout.lanes in LANES
    assert layout.lanes == 1 or HASH_ROWS * layout.cells >= MIN_CELLS_PER_LANE


@pytest.mark.parametrize("width", [192, 768, 1024, 1280, 1600, 2304, 3072, 4096, 5120, 8192])
def test_every_column_of_a_matrix_passes_through_all_lanes(width):
    """Some columns of a gradient are much larger than others; kept in one lane they would overload it."""
    for lanes in LANES:
        column = torch.arange(lanes) * width + 5
        assert (column % lanes).unique().numel() == lanes


@pytest.mark.parametrize("numel, ratio", [(0, 2.0), (5, 0.0), (5, -1.0), (5, float("nan")), (2**31, 2.0)])
def test_impossible_layouts_are_refused(numel, ratio):
    with pytest.raises(ValueError, match="element"):
        plan_layout(numel, ratio)
