"""fsdp, bf16 and noop."""

import torch

from tests.compressors.simulate import integer_gradients, make_compressors, run_step


def test_fsdp_is_the_sum():
    gradients = integer_gradients(3, 101)
    sums, nbytes = run_step(make_compressors("fsdp", 3, 101), gradients, 0)
    assert torch.equal(sums, gradients.sum(dim=0))
    assert nbytes == 2 * 101 * 4


def test_bf16_rounds_each_gradient_and_adds_in_fp32():
    gradients = torch.randn(4, 4, 101)
    sums, nbytes = run_step(make_compressors("bf16", 4, 101), gradients, 0)
    torch.testing.assert_close(sums, gradients.bfloat16().float().sum(dim=0))
    assert nbytes == 3 * 101 * 2


def test_noop_sends_nothing_and_keeps_the_own_gradient_as_the_mean():
    gradients = integer_gradients(2, 101)
    sums, nbytes = run_step(make_compressors("noop", 2, 101), gradients, 0)
    assert nbytes == 0
    for rank in range(2):
        assert torch.equal(sums[rank] / 2, gradients[rank, rank])
