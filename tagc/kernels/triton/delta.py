"""Launchers of weight differences: the contract's ``encode_delta`` and ``apply_delta``.

Shape letters: W ranks, N elements of one shard, K = ceil(N / block) scales, B elements of a block, M bytes of codes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from tagc.codec.quantize import code_bytes
from tagc.codec.rotate import draw_signs
from tagc.codec.sizes import coded_numel
from tagc.kernels.reference import EncodedDelta
from tagc.kernels.triton import delta_kernels, launch
from tagc.kernels.triton.quantize import blocks_per_program, check_block


@lru_cache(maxsize=64)
def _signs_on(device: torch.device, block: int, seed: int) -> Tensor:
    """float32 [B] on ``device``. Only the first call copies, and waits for the copy."""
    return draw_signs(block, seed).to(device)


def list_constants(bits: int, block: int, rotate: bool) -> dict[str, Any]:
    """Constants of both kernels."""
    levels, blocks = block.bit_length() - 1, blocks_per_program(block)
    return {"ROTATE": rotate, "BITS": bits, "BLOCK": block, "LEVELS": levels, "BLOCKS": blocks}


def encode_delta(
    target_N: Tensor, replica_N: Tensor, *, bits: int, block: int, rotate: int | None = None
) -> EncodedDelta:
    """As :func:`tagc.kernels.reference.encode_delta`, in one launch. ``block`` must be a power of two.

    Cost: target and replica are read once. Host syncs: none after the first call of a rotation. Exactness: bitwise.
    """
    numel, device = target_N.numel(), target_N.device
    scales = triton.cdiv(numel, block)
    codes_M = torch.empty(code_bytes(coded_numel(numel, block, rotate), bits), dtype=torch.uint8, device=device)
    scales_K = torch.empty(scales, dtype=torch.bfloat16, device=device)
    if not numel:
        return EncodedDelta(codes_M, scales_K)
    launch.check_numel(numel)
    check_block(block)
    launch.check_tensors(
        target=(target_N, launch.STATE_DTYPES, (numel,)), replica=(replica_N, launch.STATE_DTYPES, (numel,))
    )
    constants = list_constants(bits, block, rotate is not None)
    delta_kernels.subtract_and_round[(triton.cdiv(scales, constants["BLOCKS"]),)](
        target_N,
        replica_N,
        target_N if rotate is None else _signs_on(device, block, rotate),
        codes_M,
        scales_K,
        1 / math.sqrt(block),
        numel,
        scales,
        len(codes_M),
        **constants,
        **launch.OPTIONS,
    )
    return EncodedDelta(codes_M, scales_K)


def apply_delta(
    codes_WM: Tensor, scales_WK: Tensor, replica_WN: Tensor, *, bits: int, block: int, rotate: int | None = None
) -> None:
    """As :func:`tagc.kernels.reference.apply_delta`, all shards in one launch. ``block`` must be a power of two.

    Cost: the replica is read and written once. Host syncs: none after the first call of a rotation. Exactness: bitwise.
    """
    (ranks, numel), device = replica_WN.shape, replica_WN.device
    if not numel:
        return
    launch.check_numel(numel)
    check_block(block)
    scales, coded_bytes = triton.cdiv(numel, block), code_bytes(coded_numel(numel, block, rotate), bits)
    launch.check_tensors(
        replica=(replica_WN, launch.STATE_DTYPES, (ranks, numel)),
        codes=(codes_WM, (torch.uint8,), (ranks, coded_bytes)),
        scales=(scales_WK, (torch.bfloat16,), (ranks, scales)),
    )
    constants = list_constants(bits, block, rotate is not None)
    delta_kernels.add_differences[(triton.cdiv(scales, constants["BLOCKS"]), ranks)](
        codes_WM,
        scales_WK,
        replica_WN,
        scales_WK if rotate is None else _signs_on(device, block, rotate),
        1 / math.sqrt(block),
        numel,
        scales,
        coded_bytes,
        **constants,
        **launch.OPTIONS,
    )
