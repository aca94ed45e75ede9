"""Peeling: exact below its load, honest above it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.codec.hashing import build_hash_table, plan_layout
from tagc.codec.peel import peel_sketch
from tagc.codec.sketch import sketch_values
from tests.codec.common import DENSITIES, SIZES, make_values

CPU = torch.device("cpu")


def round_trip(values, ratio, seed=0):
    layout = plan_layout(values.numel(), ratio)
    table = build_hash_table(layout.rows, layout.cells, seed, CPU)
    sketch = sketch_values(values, layout, table)
    before = sketch.clone()
    peeled = peel_sketch(sketch, values != 0, layout, table)
    assert torch.equal(sketch, before), "peeling must not change its input"
    decoded = torch.zeros_like(values)
    decoded[peeled.position_E] = peeled.value_E
    return decoded, peeled


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", DENSITIES)
def test_sparse_values_come_back_exactly_at_any_size(numel, density):
    """Integers, so that subtraction does not round; a ratio that leaves a cell and a half per element."""
    values = make_values(numel, density).mul(1000).round()
    decoded, peeled = round_trip(values, ratio=0.5 if density == 1.0 else 2.0)
    assert torch.equal(peeled.position_E, values.nonzero().flatten())
    # A handful of elements can share all their cells whatever the load: at most 3 in these tiny problems.
    assert (~peeled.resolved_E).sum() <= (3 if numel < 300 else 0)
    resolved = peeled.position_E[peeled.resolved_E]
    assert torch.equal(decoded[resolved], values[resolved])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(0.2, 2.0), (0.2, 3.4), (0.36, 1.9)]))
def test_everything_is_recovered_below_the_load(seed, setting):
    density, ratio = setting  # loads 0.40, 0.68, 0.68
    values = make_values(24_593, density, seed).mul(1000).round()
    decoded, peeled = round_trip(values, ratio, seed)
    assert peeled.resolved_E.all()
    assert torch.equal(decoded, values)


def test_float_values_come_back_within_rounding():
    values = make_values(100_000, 0.36)
    decoded, peeled = round_trip(values, ratio=2.0)  # load 0.72
    assert peeled.resolved_E.float().mean() > 0.999
    resolved = peeled.position_E[peeled.resolved_E]
    torch.testing.assert_close(decoded[resolved], values[resolved], rtol=0, atol=1e-4)


def test_an_overloaded_sketch_says_what_it_could_not_separate():
    values = make_values(24_593, 0.6).mul(1000).round()
    decoded, peeled = round_trip(values, ratio=2.0)  # load 1.2
    assert peeled.resolved_E.float().mean() < 0.5
    resolved = peeled.position_E[peeled.resolved_E]
    assert torch.equal(decoded[resolved], values[resolved])
    # The median estimate of the rest beats ignoring it (LHC's fallback).
    unresolved = peeled.position_E[~peeled.resolved_E]
    assert torch.corrcoef(torch.stack([decoded[unresolved], values[unresolved]]))[0, 1] > 0.3


def test_positions_that_cancel_are_recovered_as_zero():
    """Two ranks may send opposite values: the union has the position, its sum is zero."""
    layout = plan_layout(64, 1.0)
    table = build_hash_table(layout.rows, layout.cells, 0, CPU)
    union = torch.zeros(64, dtype=torch.bool)
    union[[3, 40]] = True
    peeled = peel_sketch(torch.zeros(3, layout.cells, layout.lanes), union, layout, table)
    assert peeled.position_E.tolist() == [3, 40]
    assert peeled.value_E.tolist() == [0.0, 0.0]
    assert peeled.resolved_E.all()
