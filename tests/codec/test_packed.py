"""Packed values against a loop over elements."""

import math
from itertools import product

import pytest
import torch

from tagc.codec.bitmap import pack_bits, unpack_bits
from tagc.codec.packed import limit_selection, pack_values, plan_capacity, unpack_values
from tagc.kernels.reference import decode_packed, encode_packed
from tests.codec.common import DENSITIES, SIZES, make_values


@pytest.mark.parametrize(("numel", "density"), [(0, 1.0), *product(SIZES, DENSITIES)])
def test_values_come_back_at_their_positions(numel, density):
    x = torch.stack([make_values(numel, density, seed) for seed in range(2)])
    sent = x != 0
    capacity = int(sent.sum(-1).max())
    packed = pack_values(x, sent, capacity + 3)
    for row, values in zip(x, packed, strict=True):
        expected = [v for v in row.tolist() if v]
        assert values.tolist() == expected + [0.0] * (capacity + 3 - len(expected))
    assert torch.equal(unpack_values(packed, sent), x)


def test_the_limit_keeps_the_first():
    mask = torch.rand(3, 501) < 0.3
    for capacity in (0, 1, 50, 501):
        limited = limit_selection(mask, capacity)
        for row, kept in zip(mask, limited, strict=True):
            assert kept.nonzero().flatten().tolist() == row.nonzero().flatten().tolist()[:capacity]


def test_capacity_is_the_closed_form():
    assert plan_capacity(1000, 0.25, 1.5) == 375
    assert plan_capacity(1001, 0.25, 1.5) == 376
    assert plan_capacity(7, 1.0, 3.0) == 7
    assert plan_capacity(5, 1e-6, 1.0) == 1
    assert plan_capacity(2**31 - 1, 0.5, 1.0) == 2**30
    for numel in (0, 2**31):
        with pytest.raises(ValueError, match=f"got 0|^{numel}"):
            plan_capacity(numel, 0.2, 1.1)


def oracle(gradient, residual, threshold, decay, rank, capacity, wire_dtype, error_feedback):
    """The contract, element by element. Returns index mask, values, own, kept and the new residual as lists."""
    ranks, numel = gradient.shape
    mask, values, kept = [[False] * numel for _ in range(ranks)], [[0.0] * capacity for _ in range(ranks)], [0] * ranks
    own, rest = [0.0] * numel, [[0.0] * numel for _ in range(ranks)]
    for w in range(ranks):
        for i in range(numel):
            x = (gradient[w, i] + decay * residual[w, i].float()).item()
            if not (abs(x) >= threshold[w].item() and x != 0):
                rest[w][i] = x if error_feedback else 0.0
            elif w == rank:
                own[i] = x
                kept[w] += 1
            elif kept[w] == capacity:
                rest[w][i] = x
            else:
                wire = torch.tensor(x).to(wire_dtype).float().item()
                mask[w][i], values[w][kept[w]], rest[w][i] = True, wire, x - wire
                kept[w] += 1
    return mask, values, own, kept, rest


@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("numel", [1, 31, 33, 257])
def test_encode_packed_is_the_loop(numel, error_feedback, wire_dtype):
    ranks, rank = 3, 1
    gradient, residual = torch.randn(ranks, numel), torch.randn(ranks, numel)
    threshold = torch.tensor([[0.9], [0.8], [0.0]])
    capacity = max(1, numel // 4)  # some shards find no room
    for dtype, decay in ((torch.float32, 1.0), (torch.bfloat16, 0.5), (torch.float32, 0.0)):
        state = residual.to(dtype)
        expected = oracle(gradient, state, threshold, decay, rank, capacity, wire_dtype, error_feedback)
        mask, values, own, kept, rest = expected
        packed = encode_packed(
            gradient.clone(),
            state,
            threshold,
            decay=decay,
            rank=rank,
            capacity=capacity,
            wire_dtype=wire_dtype,
            error_feedback=error_feedback,
        )
        assert packed.values_WC.dtype == wire_dtype and packed.values_WC.is_contiguous()
        assert unpack_bits(packed.index_WB, numel).tolist() == mask
        assert packed.values_WC.tolist() == values
        assert packed.own_N.tolist() == own
        assert packed.kept_W.tolist() == kept
        assert torch.equal(state, torch.tensor(rest).to(dtype))
        torch.testing.assert_close(packed.residual_squared, torch.tensor(rest).square().sum())


@pytest.mark.parametrize("numel", [1, 31, 33, 257])
def test_decode_packed_adds_in_rank_order(numel):
    own = make_values(numel, 0.3)
    rows = torch.stack([torch.zeros(numel), *(make_values(numel, 0.5, seed) for seed in (1, 2, 3))])
    expected = own.clone()
    for row in rows:
        expected += row
    total, union = decode_packed(pack_bits(rows != 0), pack_values(rows, rows != 0, numel), own.clone())
    assert torch.equal(total, expected)
    assert union.item() == ((rows != 0).any(0) | (own != 0)).sum()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_vanishes(value):
    gradient, residual = torch.ones(2, 33), torch.zeros(2, 33)
    gradient[1, 7] = gradient[0, 5] = value
    packed = encode_packed(
        gradient,
        residual,
        torch.tensor([0.5]),
        decay=1.0,
        rank=0,
        capacity=33,
        wire_dtype=torch.bfloat16,
        error_feedback=True,
    )
    assert not residual[1, 7].isfinite()
    assert not (packed.own_N[5] + residual[0, 5]).isfinite()
    assert not packed.residual_squared.isfinite()
