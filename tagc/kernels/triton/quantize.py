"""Launchers of block quantisation: the contract's ``encode_blocks`` and ``decode_blocks``.

Shape letters: W ranks, N elements of one shard, K = ceil(N / block) scales, M = ceil(N * bits / 8) bytes of codes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.codec.quantize import code_bytes
from tagc.errors import UserError
from tagc.kernels.reference import EncodedBlocks
from tagc.kernels.triton import launch, quantize_kernels


def check_block(block: int) -> None:
    """Errors: ``UserError`` unless kernels can cut shards into such blocks."""
    if not 2 <= block <= launch.LARGEST_BLOCK or block & (block - 1):
        raise UserError(f"block={block}: kernels=triton takes powers of two from 2 to {launch.LARGEST_BLOCK}")


def blocks_per_program(block: int) -> int:
    """Blocks that one program quantises."""
    return max(1, launch.BLOCKS_TILE // block)


def encode_blocks(
    gradient_WN: Tensor, residual_WN: Tensor, *, decay: float, rank: int, bits: int, block: int
) -> EncodedBlocks:
    """As :func:`tagc.kernels.reference.encode_blocks`, all shards in one launch.

    Cost: gradient and residual are read once. Host syncs: none. Exactness: bitwise. ``block`` must be a power of two.
    """
    ranks, numel = gradient_WN.shape
    device = gradient_WN.device
    launch.check_numel(numel)
    check_block(block)
    launch.check_tensors(
        gradient=(gradient_WN, (torch.float32,), (ranks, numel)),
        residual=(residual_WN, launch.STATE_DTYPES, (ranks, numel)),
    )
    scales, blocks = triton.cdiv(numel, block), blocks_per_program(block)
    tiles = triton.cdiv(scales, blocks)
    codes_WM = torch.empty(ranks, code_bytes(numel, bits), dtype=torch.uint8, device=device)
    scales_WK = torch.empty(ranks, scales, device=device)
    own_N = torch.empty(numel, device=device)
    squares_WT = torch.empty(ranks, tiles, device=device)
    quantize_kernels.quantize[(tiles, ranks)](
        gradient_WN,
        residual_WN,
        codes_WM,
        scales_WK,
        own_N,
        squares_WT,
        float(decay),
        rank,
        numel,
        scales,
        codes_WM.shape[1],
        HAS_DECAY=decay != 0,
        BITS=bits,
        BLOCK=block,
        BLOCKS=blocks,
        **launch.OPTIONS,
    )
    return EncodedBlocks(codes_WM, scales_WK, own_N, squares_WT.sum())


def decode_blocks(codes_WM: Tensor, scales_WK: Tensor, own_N: Tensor, *, bits: int, block: int) -> Tensor:
    """As :func:`tagc.kernels.reference.decode_blocks`, in one launch. Host syncs: none. Exactness: bitwise."""
    ranks, numel = len(codes_WM), own_N.numel()
    launch.check_numel(numel)
    check_block(block)
    launch.check_tensors(
        codes=(codes_WM, (torch.uint8,), (ranks, code_bytes(numel, bits))),
        scales=(scales_WK, (torch.float32,), (ranks, triton.cdiv(numel, block))),
        own=(own_N, (torch.float32,), (numel,)),
    )
    quantize_kernels.add_blocks[(triton.cdiv(numel, launch.ELEMENT_TILE),)](
        codes_WM,
        scales_WK,
        own_N,
        ranks,
        numel,
        scales_WK.shape[1],
        codes_WM.shape[1],
        BITS=bits,
        BLOCK=block,
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    return own_N
