"""Symmetric integers of 8, 4, 3 or 2 bits with one scale per block of consecutive elements.

Shape letters: N elements, K = ceil(N / block) blocks, M = ceil(N * bits / 8) bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec.sizes import BITS as BITS
from tagc.codec.sizes import block_count as block_count
from tagc.codec.sizes import code_bytes as code_bytes


def largest_code(bits: int) -> int:
    """The largest code: 127, 7, 3 or 1; the smallest is its negative, so that zero and signs are exact."""
    return (1 << (bits - 1)) - 1


def _cut_blocks(x: Tensor, block: int) -> Tensor:
    """[..., N] -> [..., K, block], the last block filled with zeros."""
    blocks = block_count(x.shape[-1], block)
    return torch.nn.functional.pad(x, (0, blocks * block - x.shape[-1])).unflatten(-1, (blocks, block))


def quantize_blocks(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Round every block to multiples of its largest magnitude over ``largest_code(bits)``.

    x: float32 [..., N]. Returns q int8 [..., N] and scales float32 [..., K]. Division is the true fp32 quotient and
    rounding half to even. A block that holds NaN or Inf, that is all zero, or whose scale is too small for fp32 has
    scale 0 and codes 0. Cost: two passes. Host syncs: none. Exactness: bitwise.

    >>> q, scales = quantize_blocks(torch.tensor([7.0, -3.6, 0.0, float("inf"), 1.0]), bits=4, block=3)
    >>> q.tolist(), scales.tolist()
    ([7, -4, 0, 0, 0], [1.0, 0.0])
    """
    numel, limit = x.shape[-1], largest_code(bits)
    x_KB = _cut_blocks(x, block)
    largest_K1 = x_KB.abs().amax(-1, keepdim=True)  # NaN where the block holds one
    scale_K1 = torch.where(largest_K1.isfinite(), largest_K1 / limit, 0.0)
    q_KB = torch.where(scale_K1 > 0, x_KB / scale_K1, 0.0).round().clamp(-limit, limit)
    return q_KB.to(torch.int8).flatten(-2)[..., :numel].contiguous(), scale_K1.squeeze(-1)


def dequantize_blocks(q: Tensor, scales: Tensor, block: int) -> Tensor:
    """``q * scale``: int8 [..., N] and float32 [..., K] -> float32 [..., N]. Exactness: one rounding.

    >>> dequantize_blocks(torch.tensor([7, -4, 1], dtype=torch.int8), torch.tensor([1.0, 0.5]), 2).tolist()
    [7.0, -4.0, 0.5]
    """
    return (_cut_blocks(q, block) * scales.unsqueeze(-1)).flatten(-2)[..., : q.shape[-1]]


def pack_codes(q: Tensor, bits: int) -> Tensor:
    """Two's complement codes without gaps, the first in the lowest bits. int8 [..., N] -> uint8 [..., M].

    >>> pack_codes(torch.tensor([1, -1, 7], dtype=torch.int8), 4).tolist()
    [241, 7]
    >>> pack_codes(torch.tensor([1, -1, 3], dtype=torch.int8), 3).tolist()
    [249, 0]
    """
    numel = q.shape[-1]
    if bits == 8:
        return q.view(torch.uint8)
    codes = torch.nn.functional.pad(q.long() & ((1 << bits) - 1), (0, -numel % 8)).unflatten(-1, (-1, 8))
    words = (codes << (torch.arange(8, device=q.device) * bits)).sum(dim=-1, keepdim=True)  # 8 codes: `bits` bytes
    octets = (words >> (torch.arange(bits, device=q.device) * 8)) & 255
    return octets.to(torch.uint8).flatten(-2)[..., : code_bytes(numel, bits)].contiguous()


def unpack_codes(codes: Tensor, bits: int, numel: int) -> Tensor:
    """Invert :func:`pack_codes`. codes: uint8 [..., M]. Returns int8 [..., numel].

    >>> unpack_codes(torch.tensor([241, 7], dtype=torch.uint8), 4, 3).tolist()
    [1, -1, 7]
    """
    if bits == 8:
        return codes.view(torch.int8)
    octets = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % bits)).unflatten(-1, (-1, bits))
    words = (octets << (torch.arange(bits, device=codes.device) * 8)).sum(dim=-1, keepdim=True)
    q = (words >> (torch.arange(8, device=codes.device) * bits)) & ((1 << bits) - 1)
    half = 1 << (bits - 1)
    return ((q ^ half) - half).to(torch.int8).flatten(-2)[..., :numel].contiguous()
