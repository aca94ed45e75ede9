"""Block quantisation against a loop over elements."""

import math
import struct

import numpy as np
import pytest
import torch

from tagc.codec.quantize import code_bytes, dequantize_blocks, largest_code, pack_codes, quantize_blocks, unpack_codes
from tagc.kernels.reference import decode_blocks, encode_blocks
from tests.codec.common import DENSITIES, SIZES, make_values


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("numel", (0, *SIZES))
def test_codes_survive_packing(numel, bits):
    limit = largest_code(bits)
    q = torch.randint(-limit, limit + 1, (3, numel), dtype=torch.int8)
    codes = pack_codes(q, bits)
    assert codes.dtype == torch.uint8 and codes.shape == (3, code_bytes(numel, bits))
    assert torch.equal(unpack_codes(codes, bits, numel), q)


def test_other_bits_are_refused():
    with pytest.raises(ValueError, match="choose 8, 4, 3 or 2"):
        code_bytes(10, 5)


def oracle(x, bits, block):
    """Codes and scales of one shard in numpy's fp32, block by block and element by element."""
    limit, q, scales = np.float32(largest_code(bits)), [], []
    values = x.numpy()
    for begin in range(0, len(values), block):
        part = values[begin : begin + block]
        largest = np.max(np.abs(part))
        scale = largest / limit if np.isfinite(largest) else np.float32(0)
        scales.append(scale)
        q += [int(np.clip(np.rint(v / scale), -limit, limit)) if scale > 0 else 0 for v in part]
    return q, scales


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", DENSITIES)
def test_quantize_is_the_loop(numel, density, bits):
    block = 256
    x = make_values(numel, density)
    q, scales = quantize_blocks(x, bits, block)
    expected_q, expected_scales = oracle(x, bits, block)
    assert q.tolist() == expected_q
    assert np.array_equal(scales.numpy(), np.array(expected_scales, dtype=np.float32))
    error = (dequantize_blocks(q, scales, block) - x).abs()
    assert (error <= 0.5001 * scales.repeat_interleave(block)[:numel]).all()


def test_halves_round_to_even_and_subnormals_are_clamped():
    q, _ = quantize_blocks(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]), 8, 8)
    assert q.tolist() == [127, 0, 2, 2, 0, -2]
    tiny = struct.unpack("f", struct.pack("I", 190))[0]  # 190 units in the last place: its scale rounds to one
    assert quantize_blocks(torch.tensor([tiny, -tiny]), 8, 8)[0].tolist() == [127, -127]
    least = struct.unpack("f", struct.pack("I", 1))[0]  # its scale rounds to zero
    q, scales = quantize_blocks(torch.tensor([least]), 8, 8)
    assert (q.tolist(), scales.tolist()) == ([0], [0.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_stays_with_its_block(bits, value):
    gradient, residual = torch.randn(2, 40), torch.zeros(2, 40)
    gradient[0, 3] = gradient[1, 12] = value
    before = gradient.clone()
    blocks = encode_blocks(gradient, residual, decay=1.0, rank=0, bits=bits, block=8)
    assert blocks.scales_WK[1].tolist()[1] == 0.0
    assert not unpack_codes(blocks.codes_WM, bits, 40)[1, 8:16].any()
    assert torch.equal(residual[1, 8:16].nan_to_num(), before[1, 8:16].nan_to_num())
    assert not residual[1, 12].isfinite()
    assert residual[1, :8].isfinite().all()
    assert not blocks.own_N[3].isfinite()
    assert not blocks.residual_squared.isfinite()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [1, 31, 33, 257, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encode_and_decode_blocks_are_complements(numel, bits, dtype):
    ranks, rank, block = 3, 1, 64
    gradient = torch.randn(ranks, numel)
    state = torch.randn(ranks, numel).to(dtype)
    x = gradient + 0.5 * state.float()
    blocks = encode_blocks(gradient.clone(), state, decay=0.5, rank=rank, bits=bits, block=block)
    q, scales = quantize_blocks(x, bits, block)
    q[rank], scales[rank] = 0, 0
    assert torch.equal(unpack_codes(blocks.codes_WM, bits, numel), q)
    assert torch.equal(blocks.scales_WK, scales)
    assert torch.equal(blocks.own_N, x[rank])
    rest = x - dequantize_blocks(q, scales, block)
    rest[rank] = 0
    assert torch.equal(state, rest.to(dtype))
    torch.testing.assert_close(blocks.residual_squared, rest.square().sum())
    expected = x[rank].clone()
    for w in range(ranks):
        expected += dequantize_blocks(q[w], scales[w], block)
    total = decode_blocks(blocks.codes_WM, blocks.scales_WK, blocks.own_N, bits=bits, block=block)
    assert torch.equal(total, expected)
