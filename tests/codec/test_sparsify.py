"""Threshold estimators: the density they reach, on awkward inputs too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.codec.sparsify import select_values, threshold_exact, threshold_lognormal, threshold_sampled


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
def test_sampled_is_within_a_point(density):
    x = gradient_like(400_000)
    threshold = threshold_sampled(x, density, 65_536, torch.Generator().manual_seed(1))
    assert abs(kept_share(x, threshold) - density) < 0.01


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
        threshold_sampled(x, 0.2, 4096, torch.Generator().manual_seed(0)),
    ):
        assert threshold.shape == (2, 1)
        assert (select_values(x, threshold).float().mean(dim=1) - 0.2).abs().max() < 0.03


def test_sampling_is_reproducible():
    x = gradient_like(100_000)
    first, second = (threshold_sampled(x, 0.2, 1000, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
