"""The index against a bit-by-bit oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.codec.bitmap import bitmap_bytes, or_bitmaps, pack_bits, unpack_bits
from tests.codec.common import DENSITIES, SIZES, make_values


def pack_by_hand(mask: list[bool]) -> list[int]:
    packed = [0] * ((len(mask) + 7) // 8)
    for i, bit in enumerate(mask):
        if bit:
            packed[i // 8] |= 1 << (i % 8)
    return packed


@pytest.mark.parametrize("numel", [0, *SIZES])
@pytest.mark.parametrize("density", DENSITIES)
def test_packing_matches_the_oracle_and_comes_back(numel, density):
    if numel == 0 and density == "one":
        pytest.skip("no element to set")
    mask = make_values(numel, density) != 0
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert packed.shape == (bitmap_bytes(numel),)
    assert packed.tolist() == pack_by_hand(mask.tolist())
    assert torch.equal(unpack_bits(packed, numel), mask)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.integers(2, 5), st.randoms(use_true_random=False))
def test_or_of_overlapping_masks_is_their_union(numel, ranks, random):
    masks = torch.tensor([[random.random() < 0.5 for _ in range(numel)] for _ in range(ranks)])
    union = unpack_bits(or_bitmaps(pack_bits(masks)), numel)
    assert torch.equal(union, masks.any(dim=0))


def test_summing_bitmaps_would_corrupt_neighbours_and_or_does_not():
    """The public reference adds 1-bit indices: a position set on two ranks carries into the next one."""
    mask = torch.tensor([[True, False, True, False], [True, False, False, False]])
    packed = pack_bits(mask)
    summed = packed[0] + packed[1]
    assert unpack_bits(summed[None], 4).tolist() != [[True, False, True, False]]
    assert unpack_bits(or_bitmaps(packed), 4).tolist() == [True, False, True, False]


def test_pack_keeps_rows_apart():
    mask = torch.eye(3, 9, dtype=torch.bool)
    assert pack_bits(mask).tolist() == [[1, 0], [2, 0], [4, 0]]
    assert torch.equal(unpack_bits(pack_bits(mask), 9), mask)
