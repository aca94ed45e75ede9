"""Intervals cover as often as they say; an answer moves with its data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.numbers import stats
from analysis.numbers.stats import bootstrap_median, mean_interval, spread

VALUES = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("estimate", "n", "least", "most"), [(bootstrap_median, 15, 44, 50), (mean_interval, 3, 180, 199)]
)
def test_an_interval_covers_the_truth_about_as_often_as_it_says(estimate, n, least, most):
    generator, trials = np.random.default_rng(0), 50 if estimate is bootstrap_median else 200
    hits = 0
    for _ in range(trials):
        found = estimate(generator.normal(5, 1, size=n))
        assert found.n == n and found.low <= found.middle <= found.high
        hits += found.low <= 5 <= found.high
    assert least <= hits <= most


@settings(max_examples=30, deadline=None)
@given(VALUES, st.floats(-50, 50), st.sampled_from([bootstrap_median, mean_interval]))
def test_an_estimate_moves_with_its_data_and_ignores_their_order(values, shift, estimate):
    found, moved = estimate(values), estimate([value + shift for value in values])
    assert moved[1:] == pytest.approx([number + shift for number in found[1:]], abs=1e-6)
    assert estimate(sorted(values)).middle == pytest.approx(found.middle)
    assert min(values) - 1e-9 <= found.middle <= max(values) + 1e-9


@settings(max_examples=30, deadline=None)
@given(VALUES)
def test_what_is_not_finite_does_not_count_and_n_says_so(values):
    dirty = [math.nan, *values, math.inf]
    for function in (bootstrap_median, mean_interval, spread):
        assert function(dirty) == function(values)
        assert function(dirty).n == len(values)


def test_one_value_has_no_interval_and_none_no_middle():
    for function in (bootstrap_median, mean_interval):
        single, none = function([3.0]), function([])
        assert (single.n, single.middle, single.is_known) == (1, 3.0, False)
        assert none.n == 0 and math.isnan(none.middle)


def test_the_bootstrap_is_the_same_in_every_process():
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert bootstrap_median(values) == bootstrap_median(values)
    assert bootstrap_median(values, seed=1).middle == stats.bootstrap_median(values).middle
