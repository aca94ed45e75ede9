"""int8 and int4 as arithmetic: what rounding misses is kept, bytes are as computed."""

import math

import pytest
import torch

from tests.compressors.simulate import integer_gradients, make_compressors, run_step, total_residual

SIZES = [1, 31, 33, 257, 5003]
LIMIT = {"int8": 127, "int4": 7}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_applied_plus_what_is_kept_is_the_gradient(name, ranks, numel, dtype):
    compressors = make_compressors(name, ranks, numel, residual_dtype=dtype)
    applied, produced = torch.zeros(ranks, numel), torch.zeros(ranks, numel)
    for step in range(3):
        gradients = torch.randn(ranks, ranks, numel, generator=torch.Generator().manual_seed(step))
        applied, produced = applied + run_step(compressors, gradients, step)[0], produced + gradients.sum(dim=0)
    error = applied + total_residual(compressors) - produced
    assert error.abs().max() < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_multiples_of_the_scale_are_exact(name):
    """Integers up to the largest code, which occurs in every block: the scale is 1 and nothing is rounded."""
    limit, numel = LIMIT[name], 5003
    gradients = torch.randint(-limit, limit + 1, (3, 3, numel)).float()
    gradients[..., ::64] = limit
    compressors = make_compressors(name, 3, numel, block=64)
    sums, _ = run_step(compressors, gradients, 0)
    assert torch.equal(sums, gradients.sum(dim=0))
    assert not total_residual(compressors).any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_one_step_errs_by_half_a_code_and_feedback_makes_up_for_it(name):
    gradients = torch.randn(2, 2, 5003, generator=torch.Generator().manual_seed(0))
    bound = gradients.abs().max() / LIMIT[name] / 2 * 1.001
    means = {}
    for feedback in (True, False):
        compressors = make_compressors(name, 2, 5003, error_feedback=feedback)
        sums = [run_step(compressors, gradients, step)[0] for step in range(20)]
        assert 0 < (sums[0] - gradients.sum(dim=0)).abs().max() < bound
        means[feedback] = (torch.stack(sums).mean(dim=0) - gradients.sum(dim=0)).abs().max()
        assert total_residual(compressors).any() == feedback
    assert means[True] < 0.15 * means[False], "without feedback the same error repeats"


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_constant_gradients_are_sent_whole(name, value):
    compressors = make_compressors(name, 2, 1009)
    gradients = torch.full((2, 2, 1009), value)
    sums, _ = run_step(compressors, gradients, 0)
    torch.testing.assert_close(sums, gradients.sum(dim=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_and_spoils_only_its_block(name, value):
    compressors = make_compressors(name, 2, 1009)
    gradients = torch.randn(2, 2, 1009)
    gradients[0, 1, 300] = value  # on its way to a peer
    gradients[1, 1, 700] = value  # the owner's own
    sums, _ = run_step(compressors, gradients, 0)
    whole = (sums + total_residual(compressors))[1]
    assert (~whole.isfinite()).nonzero().flatten().tolist() == [300, 700]
    torch.testing.assert_close(whole.nan_to_num(0, 0, 0), gradients.sum(0)[1].nan_to_num(0, 0, 0))
    assert not compressors[0].payload.stats.residual_squared.isfinite()
    # Without feedback too, the sum that is applied must not look whole where the own value is bad.
    assert not sums[1, 700].isfinite()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_nothing_travels_to_oneself(name):
    codes, scales = make_compressors(name, 3, 5003)[1].encode(integer_gradients(3, 5003)[1], 0).parts
    for part in (codes, scales):
        assert part.tensor[[0, 2]].any(dim=1).all()
        assert not part.tensor[1].any()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("numel", SIZES)
def test_sent_bytes_equal_the_closed_form(ranks, name, bits, numel):
    compressors = make_compressors(name, ranks, numel, block=64, warmup_steps=1, value_dtype="bfloat16")
    message = math.ceil(numel * bits / 8) + math.ceil(numel / 64) * 4
    for step, nbytes in enumerate([(ranks - 1) * numel * 2, (ranks - 1) * message]):
        assert sum(compressors[0].expected_bytes(step).values()) == nbytes
        assert run_step(compressors, integer_gradients(ranks, numel), step)[1] == nbytes


def test_a_message_larger_than_bf16_is_sent_dense():
    compressor = make_compressors("int8", 2, 1, dense_fallback=True, value_dtype="bfloat16")[0]
    assert compressor.is_dense(0)
    assert "compressor.block" in compressor.explain_dense()
    assert make_compressors("int8", 2, 257, dense_fallback=True, value_dtype="bfloat16")[0].explain_dense() is None


@pytest.mark.parametrize("feedback", [True, False])
def test_dense_warm_up_keeps_its_rounding_only_with_feedback(feedback):
    compressors = make_compressors("int8", 2, 257, warmup_steps=1, value_dtype="bfloat16", error_feedback=feedback)
    gradients = torch.randn(2, 2, 257)
    sums, _ = run_step(compressors, gradients, 0)
    assert total_residual(compressors).any() == feedback
    kept = sums + total_residual(compressors)
    torch.testing.assert_close(kept, gradients.sum(dim=0), rtol=0, atol=1e-6 if feedback else 0.05)
