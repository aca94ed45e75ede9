"""Threshold estimators: the density they reach, on awkward inputs too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.codec.sparsify import draw_positions, select_values, threshold_exact, threshold_lognormal

CPU = torch.device("cpu")


def kept_share(x, threshold):
    return select_values(x, threshold).float().mean().item()


def gradient_like(numel, seed=0):
    """Magnitudes over several orders, as gradients have: log-normal, both signs."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = (2 * torch.randn(numel, generator=generator)).exp()
    return magnitude * (torch.randint(2, (numel,), generator=generator) * 2 - 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.floats(0.001, 1.0), st.integers(0, 99))
def test_exact_keeps_exactly_k(numel, density, seed):
    x = torch.randperm(numel, generator=torch.Generator().manual_seed(seed)).float() + 1  # no ties, no zeros
    kept = select_values(x, threshold_exact(x, density))
    assert kept.sum() == max(1, round(density * numel))
    assert x[kept].min() > (x[~kept].max() if (~kept).any() else 0)


@pytest.mark.parametrize("density", [0.01, 0.1, 0.2, 0.4])
def test_a_sample_is_within_a_point(density):
    x = gradient_like(400_000)
    threshold = threshold_exact(x[draw_positions(400_000, 32_768, 1, CPU)], density)
    assert abs(kept_share(x, threshold) - density) < 0.01


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 4000), st.integers(0, 2**32 - 1))
def test_sampled_positions_are_spread_evenly(numel, sample, shift):
    position = draw_positions(numel, sample, shift, CPU)
    parts = min(sample, numel)
    assert position.unique().tolist() == sorted(position.tolist()), "no position comes twice"
    start = (position - shift) % numel
    edge = torch.arange(parts + 1) * numel // parts
    assert ((edge[:-1] <= start) & (start < edge[1:])).all(), "one in every part"


def test_sampled_positions_do_not_follow_the_columns():
    """A gradient's columns differ in size: each must be met as often as any other."""
    column = torch.cat([draw_positions(768 * 4096, 32_768, shift, CPU) % 768 for shift in (0, 99, 2**31 + 7)])
    count = torch.bincount(column, minlength=768)
    assert abs(count.float().std() / (3 * 32_768 / 768) ** 0.5 - 1) < 0.1, "as independent draws would scatter"


def test_the_largest_shard_has_positions_that_fit():
    position = draw_positions(2**31 - 1, 512, 2**32 - 1, CPU)
    assert position.min() >= 0
    assert 2**31 - 2**24 < position.max() < 2**31 - 1


@pytest.mark.parametrize("density", [0.01, 0.1, 0.2, 0.4])
def test_lognormal_is_within_a_point_on_lognormal_values(density):
    x = gradient_like(400_000)
    assert abs(kept_share(x, threshold_lognormal(x, density)) - density) < 0.01


def test_lognormal_counts_zeros_of_absent_tokens():
    """Half of the rows are zero: the wanted share is of all elements, so two in five of the others are kept."""
    x = gradient_like(200_000)
    x[:100_000] = 0
    assert abs(kept_share(x, threshold_lognormal(x, 0.2)) - 0.2) < 0.01


@pytest.mark.parametrize("estimate", [threshold_exact, threshold_lognormal])
def test_fewer_nonzeros_than_wanted_are_all_kept_and_zeros_never(estimate):
    x = torch.zeros(1000)
    x[:50] = gradient_like(50)
    assert select_values(x, estimate(x, 0.2)).nonzero().flatten().tolist() == list(range(50))


@pytest.mark.parametrize("estimate", [threshold_exact, threshold_lognormal])
def test_all_zero_sends_nothing_and_all_equal_sends_something(estimate):
    zeros, ones = torch.zeros(100), torch.ones(100)
    assert not select_values(zeros, estimate(zeros, 0.2)).any()
    assert select_values(ones, estimate(ones, 0.2)).any()


def test_a_long_lower_tail_does_not_silence_a_shard():
    """Underflow widens the log-normal fit until its quantile passes the maximum; the largest value is still sent."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    x[:3000] *= 1e-20
    assert select_values(x, threshold_lognormal(x, 0.2)).any()


def test_every_shard_has_its_own_threshold():
    x = torch.stack([gradient_like(10_000, 1), 100 * gradient_like(10_000, 2)])
    for threshold in (
        threshold_exact(x, 0.2),
        threshold_lognormal(x, 0.2),
        threshold_exact(x[:, draw_positions(10_000, 4096, 0, CPU)], 0.2),
    ):
        assert threshold.shape == (2, 1)
        assert (select_values(x, threshold).float().mean(dim=1) - 0.2).abs().max() < 0.03
