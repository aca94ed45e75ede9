"""Differences of weights: every backend against code in plain numpy, and what differences are for."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tagc.codec.delta import delta_bytes
from tagc.codec.rotate import draw_signs, rotate_blocks, unrotate_blocks
from tagc.kernels import resolve_backend
from tests.kernels.oracle import splitmix64
from tests.kernels.triton_backend import DEVICE
from tests.kernels.triton_backend import backend as triton_backend

# On a GPU the compiled kernels are compared in test_triton.py; these tests build their tensors on the CPU.
NEEDS_INTERPRETER = pytest.mark.skipif(DEVICE != "cpu", reason="compiled kernels take no CPU tensors")

CASES = [  # numel, block, rotate, dtype of the target and of the replica
    (1, 8, None, torch.float32, torch.float32),
    (33, 32, 5, torch.bfloat16, torch.bfloat16),
    (257, 32, None, torch.bfloat16, torch.float32),
    (1031, 256, 5, torch.float32, torch.bfloat16),
    (1031, 256, None, torch.float32, torch.float32),
]


@pytest.fixture(params=["reference", "cpu", pytest.param("triton", marks=NEEDS_INTERPRETER)])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return triton_backend if request.param == "triton" else resolve_backend(request.param)[1]


def rotate(x: np.ndarray, seed: int, inverse: bool = False) -> np.ndarray:
    """H (s * x) / sqrt(B) from the matrix's definition, in float64; H[i, j] = (-1) ** (bits that i and j share)."""
    block = len(x)
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]) / math.sqrt(block)
    signs = np.array([1 - 2 * (splitmix64(i ^ splitmix64(seed)) & 1) for i in range(block)])
    return signs * (hadamard @ x) if inverse else hadamard @ (signs * x)


def read_codes(codes: list[int], bits: int, count: int) -> list[int]:
    stream = sum(byte << (8 * i) for i, byte in enumerate(codes))
    values = [stream >> (bits * i) & ((1 << bits) - 1) for i in range(count)]
    return [value - (1 << bits) * (value >> (bits - 1)) for value in values]


def decode(codes_M: Tensor, scales_K: Tensor, numel: int, bits: int, block: int, seed: int | None) -> np.ndarray:
    """float64: what one owner sent."""
    parts, whole = [], len(scales_K) * block if seed is not None else numel
    q = np.array(read_codes(codes_M.tolist(), bits, whole), dtype=np.float64)
    for k, scale in enumerate(scales_K.double().tolist()):
        part = q[k * block : (k + 1) * block] * scale
        parts.append(part if seed is None else rotate(part, seed, inverse=True))
    return np.concatenate(parts)[:numel] if parts else np.empty(0)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("numel", "block", "seed", "target_dtype", "replica_dtype"), CASES)
def test_a_difference_arrives_within_half_a_step(backend, bits, numel, block, seed, target_dtype, replica_dtype):
    generator = torch.Generator().manual_seed(numel)
    target_N = torch.randn(numel, generator=generator).to(target_dtype)
    replica_N = torch.randn(numel, generator=generator).to(replica_dtype)
    if numel > 1000:
        target_N[:block] = replica_N[:block]  # nothing to send
        target_N[block + 3] = 1e30  # one outlier
        target_N[2 * block : 3 * block], replica_N[2 * block : 3 * block] = 1e-40, 0.0  # denormals
    codes_M, scales_K = backend.encode_delta(target_N, replica_N, bits=bits, block=block, rotate=seed)
    assert (codes_M.dtype, scales_K.dtype) == (torch.uint8, torch.bfloat16)
    assert codes_M.numel() + 2 * scales_K.numel() == delta_bytes(numel, bits, block, seed)
    delta = (target_N.float() - replica_N.float()).double().numpy()
    limit = 2 ** (bits - 1) - 1
    for k, scale in enumerate(scales_K.double().tolist()):
        part = np.zeros(block)
        part[: len(delta[k * block : (k + 1) * block])] = delta[k * block : (k + 1) * block]
        rotated = part if seed is None else rotate(part, seed)
        largest = np.abs(rotated).max()
        assert largest / limit * (1 - 1e-6) <= scale <= largest / limit * (1 + 2**-7) + 1e-40
        q = np.array(read_codes(codes_M.tolist(), bits, len(scales_K) * block))[k * block : (k + 1) * block]
        error = np.abs(rotated - q * scale)[: block if seed is not None else len(delta) - k * block]
        assert error.max() <= scale * (0.5 + 1e-4)
    sent = decode(codes_M, scales_K, numel, bits, block, seed)
    replica_WN = torch.stack((replica_N, replica_N))
    backend.apply_delta(
        *(torch.stack((codes_M, codes_M)), torch.stack((scales_K, scales_K)), replica_WN),
        bits=bits,
        block=block,
        rotate=seed,
    )
    assert replica_WN.dtype == replica_dtype and torch.equal(*replica_WN)
    expected = torch.from_numpy(replica_N.double().numpy() + sent).to(replica_dtype)
    tolerance = 2**-7 if replica_dtype == torch.bfloat16 else 1e-5
    scale_N = scales_K.double().repeat_interleave(block)[:numel] * limit
    assert ((replica_WN[0].double() - expected.double()).abs() <= tolerance * (scale_N + expected.abs().double())).all()


@pytest.mark.timed  # 4 bits are what `make bench` times
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("seed", [None, 5])
def test_backends_agree_to_the_bit(bits, seed):
    reference, cpu = (resolve_backend(name)[1] for name in ("reference", "cpu"))
    target_N, replica_N = torch.randn(2, 777)
    sent = [module.encode_delta(target_N, replica_N, bits=bits, block=64, rotate=seed) for module in (reference, cpu)]
    assert torch.equal(sent[0].codes_M, sent[1].codes_M) and torch.equal(sent[0].scales_K, sent[1].scales_K)
    replicas = [replica_N[None].clone(), replica_N[None].clone()]
    for module, replica_WN in zip((reference, cpu), replicas, strict=True):
        module.apply_delta(sent[0].codes_M[None], sent[0].scales_K[None], replica_WN, bits=bits, block=64, rotate=seed)
    assert torch.equal(*replicas)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_block_that_is_not_finite_says_so(backend, value, seed):
    target_N = torch.ones(96)
    target_N[40] = value
    sent = backend.encode_delta(target_N, torch.zeros(96), bits=4, block=32, rotate=seed)
    assert sent.scales_K.isnan().tolist() == [False, True, False]


def test_an_empty_shard(backend):
    empty = torch.empty(0)
    sent = backend.encode_delta(empty, empty, bits=3, block=32)
    assert sent.codes_M.numel() == sent.scales_K.numel() == 0
    backend.apply_delta(sent.codes_M[None], sent.scales_K[None], empty[None], bits=3, block=32)


def test_errors_do_not_build_up_and_a_steady_weight_is_reached(backend):
    """The error of a step is in the next difference: it stays below a step's, and vanishes when the weight stands."""
    steps = torch.full((256,), 1e-3) * torch.linspace(0.1, 1.0, 256)
    target_N, replica_1N, lags = torch.zeros(256), torch.zeros(1, 256), []
    for step in range(60):
        target_N = target_N + steps if step < 40 else target_N
        sent = backend.encode_delta(target_N, replica_1N[0], bits=4, block=256)
        backend.apply_delta(sent.codes_M[None], sent.scales_K[None], replica_1N, bits=4, block=256)
        lags.append((target_N - replica_1N[0]).abs().max().item())
    assert max(lags[:40]) < 0.2 * steps.max() and max(lags[20:40]) < 1.5 * max(lags[:20])
    assert lags[-1] < 1e-6 * target_N.max()


def test_differences_converge_where_rounded_weights_stay_put(backend):
    """Least squares from a far start: one large weight sets the step of direct rounding above every update."""
    goal, weight_N, replica_1N = torch.zeros(32), torch.full((32,), 0.3), torch.zeros(1, 32)
    goal[0] = weight_N[0] = 100.0
    direct_1N = torch.zeros(1, 32)
    kept_N = weight_N.clone()
    for _ in range(200):
        for replica, weights in ((replica_1N, weight_N), (direct_1N, kept_N)):
            base = replica[0] if replica is replica_1N else torch.zeros(32)
            sent = backend.encode_delta(weights, base, bits=4, block=32)
            if replica is direct_1N:
                replica.zero_()
            backend.apply_delta(sent.codes_M[None], sent.scales_K[None], replica, bits=4, block=32)
        weight_N = weight_N - 0.1 * (replica_1N[0] - goal)
        kept_N = kept_N - 0.1 * (direct_1N[0] - goal)
    assert (weight_N - goal).abs().max() < 1e-3
    assert (kept_N - goal)[1:].abs().min() > 0.29


def test_a_rotation_keeps_lengths_and_comes_back():
    x_KB = torch.randn(3, 64)
    rotated = rotate_blocks(x_KB, 7)
    torch.testing.assert_close(
        rotated[1].double(), torch.from_numpy(rotate(x_KB[1].double().numpy(), 7)), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(rotated.norm(dim=1), x_KB.norm(dim=1))
    torch.testing.assert_close(unrotate_blocks(rotated, 7), x_KB)
    with pytest.raises(ValueError, match="block=96 cannot be rotated: it must be a power of two"):
        draw_signs(96, 0)


def test_blocks_of_no_whole_bytes_and_shapes_that_differ():
    cpu = resolve_backend("cpu")[1]
    with pytest.raises(ValueError, match="multiple of 8 elements"):
        cpu.encode_delta(torch.zeros(9), torch.zeros(9), bits=3, block=12)
    with pytest.raises(ValueError, match="differ in shape"):
        cpu.encode_delta(torch.zeros(9), torch.zeros(8), bits=3, block=16)
    with pytest.raises(ValueError, match="do not fit replicas of 9 elements on 1 ranks"):
        cpu.apply_delta(
            torch.zeros(1, 2, dtype=torch.uint8), torch.zeros(1, 1).bfloat16(), torch.zeros(1, 9), bits=4, block=16
        )


@pytest.mark.parametrize("bits", [3, 2])
def test_gradients_of_bits_the_cpu_kernels_cannot_pack_are_refused(bits):
    cpu = resolve_backend("cpu")[1]
    with pytest.raises(ValueError, match=f"8 or 4 bits, got {bits}"):
        cpu.encode_blocks(torch.ones(2, 64), torch.zeros(2, 64), decay=0.0, rank=0, bits=bits, block=32)
    codes_WM, scales_WK = torch.zeros(1, 8 * bits, dtype=torch.uint8), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=f"8 or 4 bits, got {bits}"):
        cpu.decode_blocks(codes_WM, scales_WK, torch.zeros(64), bits=bits, block=32)
