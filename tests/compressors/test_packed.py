"""packed as arithmetic: nothing is lost, whatever finds no room waits, bytes are as computed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compressors.simulate import integer_gradients, make_compressors, run_step, total_residual

SIZES = [1, 31, 33, 257, 5003]


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(2, 4),
    numel=st.sampled_from(SIZES),
    sparsity=st.sampled_from([0.0, 0.5, 0.8, 0.99]),
    slack=st.sampled_from([1.0, 1.1, 2.0]),
    threshold=st.sampled_from(["exact", "sampled", "lognormal"]),
    density=st.sampled_from([0.0, 0.02, 1.0]),
    seed=st.integers(0, 1000),
)
def test_what_is_applied_plus_what_is_kept_is_the_gradient(ranks, numel, sparsity, slack, threshold, density, seed):
    """Over three steps, with and without room: applied sums + residuals = all gradients, exactly on integers."""
    compressors = make_compressors(
        "packed", ranks, numel, sparsity=sparsity, capacity_slack=slack, threshold=threshold, warmup_steps=seed % 2
    )
    applied, produced = torch.zeros(ranks, numel), torch.zeros(ranks, numel)
    for step in range(3):
        gradients = integer_gradients(ranks, numel, seed + step, density)
        sums, _ = run_step(compressors, gradients, step)
        applied, produced = applied + sums, produced + gradients.sum(dim=0)
        assert torch.equal(applied + total_residual(compressors), produced)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_with_bf16_it_holds_within_rounding(ranks, dtypes):
    compressors = make_compressors("packed", ranks, 5003, value_dtype=dtypes[0], residual_dtype=dtypes[1])
    applied, produced = torch.zeros(ranks, 5003), torch.zeros(ranks, 5003)
    for step in range(3):
        gradients = torch.randn(ranks, ranks, 5003, generator=torch.Generator().manual_seed(step))
        applied, produced = applied + run_step(compressors, gradients, step)[0], produced + gradients.sum(dim=0)
    error = applied + total_residual(compressors) - produced
    # A bf16 wire costs nothing, its rounding stays in the residual; a bf16 residual costs its own rounding.
    assert error.abs().max() < (1e-5 if dtypes[1] == "float32" else 0.1)
    assert error.abs().mean() < (1e-6 if dtypes[1] == "float32" else 0.01)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("numel", SIZES)
def test_sparsity_zero_is_the_dense_sum(ranks, numel):
    compressors = make_compressors("packed", ranks, numel, sparsity=0.0)
    gradients = integer_gradients(ranks, numel)
    sums, _ = run_step(compressors, gradients, 0)
    assert torch.equal(sums, gradients.sum(dim=0))
    assert not total_residual(compressors).any()


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_gradients_are_conserved_and_no_position_starves(value):
    """All equal: no threshold separates them, so a tenth finds room at a time, in turn."""
    compressors = make_compressors("packed", 2, 1009, sparsity=0.9, capacity_slack=1.0, threshold="exact")
    gradients = torch.full((2, 2, 1009), value)
    applied = torch.zeros(2, 1009)
    for step in range(100):
        applied += run_step(compressors, gradients, step)[0]
        assert torch.equal(applied + total_residual(compressors), gradients.sum(dim=0) * (step + 1))
    assert total_residual(compressors).max() <= 40 * value


def test_a_threshold_that_is_too_low_starves_no_position():
    """Some columns large, most small: the log-normal model selects more than there is room for, in every step."""
    compressors = make_compressors("packed", 2, 2003, sparsity=0.8, threshold="lognormal")
    generator = torch.Generator().manual_seed(0)
    size = torch.where(torch.rand(2003, generator=generator) < 0.3, 1.0, 1e-3)
    for step in range(100):
        run_step(compressors, size * (1 + torch.rand(2, 2, 2003, generator=generator)), step)
    tail, head = (total_residual(compressors)[:, part].abs().mean() for part in (slice(-200, None), slice(200)))
    assert tail < 3 * head  # 50 times as large, and growing, if the threshold never rises


def test_overflow_stays_even_without_error_feedback():
    compressors = make_compressors("packed", 2, 5003, sparsity=0.8, error_feedback=False, threshold="exact")
    run_step(compressors, integer_gradients(2, 5003), 0)
    assert not total_residual(compressors).any()
    gradients = torch.full((2, 2, 5003), 2.0)
    sums, _ = run_step(compressors, gradients, 1)
    assert total_residual(compressors).any()
    assert torch.equal(sums + total_residual(compressors), gradients.sum(dim=0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("threshold", ["exact", "sampled", "lognormal"])
def test_what_is_not_finite_shows(value, threshold):
    compressors = make_compressors("packed", 2, 257, threshold=threshold)
    gradients = torch.randn(2, 2, 257)
    gradients[0, 1, 100] = value
    sums, _ = run_step(compressors, gradients, 0)
    assert not (sums + total_residual(compressors))[1, 100].isfinite()
    assert not compressors[0].payload.stats.residual_squared.isfinite()


def test_each_rank_sends_its_largest_and_nothing_to_itself():
    compressors = make_compressors("packed", 3, 5003, threshold="exact")
    gradients = integer_gradients(3, 5003)
    index, values = compressors[1].encode(gradients[1].clone(), 0).parts
    assert not index.tensor[1].any() and not values.tensor[1].any()
    for peer in (0, 2):
        sent = values.tensor[peer][values.tensor[peer] != 0]
        assert abs(len(sent) / 5003 - 0.2) < 0.01
        assert sent.abs().min() >= gradients[1, peer].abs().sort().values[-len(sent)]


def test_stats_count_what_was_sent_and_the_union():
    compressors = make_compressors("packed", 2, 5003, threshold="exact")
    gradients = integer_gradients(2, 5003)
    sums, _ = run_step(compressors, gradients, 0)
    for rank, compressor in enumerate(compressors):
        stats = compressor.payload.stats
        assert abs(stats.kept.item() / (2 * 5003) - 0.2) < 0.01
        # A union position can only look empty where two values cancel.
        assert 0 <= stats.union.item() - (sums[rank] != 0).sum().item() < 20
        assert (stats.peers_union.item(), stats.unresolved.item()) == (0, 0)
        residual = torch.cat(list(compressor.residuals().values()), dim=1)
        torch.testing.assert_close(stats.residual_squared, residual.square().sum())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sent_bytes_equal_the_closed_form(ranks, dtype):
    numel, item = 5003, 4 if dtype == "float32" else 2
    compressors = make_compressors("packed", ranks, numel, value_dtype=dtype, sparsity=0.75, warmup_steps=1)
    capacity = math.ceil(0.25 * 1.1 * numel)
    expected = [(ranks - 1) * numel * item, (ranks - 1) * (math.ceil(numel / 8) + capacity * item)]
    for step, nbytes in enumerate(expected):
        assert sum(compressors[0].expected_bytes(step).values()) == nbytes
        assert run_step(compressors, integer_gradients(ranks, numel), step)[1] == nbytes


def test_larger_than_dense_is_sent_dense():
    for sparsity, dtype, is_dense in ((0.0, "float32", True), (0.12, "bfloat16", True), (0.5, "bfloat16", False)):
        settings = {"sparsity": sparsity, "value_dtype": dtype, "dense_fallback": True}
        compressors = make_compressors("packed", 2, 5003, **settings)
        assert compressors[0].is_dense(10**9) == is_dense
        reason = compressors[0].explain_dense()
        assert ("compressor.capacity_slack" in reason) if is_dense else (reason is None)
        nbytes = sum(compressors[0].expected_bytes(0).values())
        assert run_step(compressors, integer_gradients(2, 5003), 0)[1] == nbytes
