"""Symmetric integers of 8 or 4 bits with one fp32 scale per block of consecutive elements.

Shape letters: N elements, K = ceil(N / block) blocks, M = ceil(N * bits / 8) bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes

BITS = (8, 4)


def code_bytes(numel: int, bits: int) -> int:
    """M, bytes of the codes of ``numel`` elements. Errors: ``ValueError`` unless bits is 8 or 4."""
    if bits not in BITS:
        raise ValueError(f"bits={bits} is not supported; choose 8 or 4")
    return bitmap_bytes(numel * bits)


def largest_code(bits: int) -> int:
    """The largest code, 127 or 7; the smallest is its negative, so that zero and signs are exact."""
    return (1 << (bits - 1)) - 1


def _cut_blocks(x: Tensor, block: int) -> Tensor:
    """[..., N] -> [..., K, block], the last block filled with zeros."""
    blocks = -(-x.shape[-1] // block)
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (blocks, block))


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
    """Two's complement bytes, or nibbles: element 2i in the low half of byte i. int8 [..., N] -> uint8 [..., M].

    >>> pack_codes(torch.tensor([1, -1, 7], dtype=torch.int8), 4).tolist()
    [241, 7]
    """
    codes = q.view(torch.uint8)
    if bits == 8:
        return codes
    nibbles = torch.nn.functional.pad(codes & 15, (0, q.shape[-1] % 2))
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack_codes(codes: Tensor, bits: int, numel: int) -> Tensor:
    """Invert :func:`pack_codes`. codes: uint8 [..., M]. Returns int8 [..., numel].

    >>> unpack_codes(torch.tensor([241, 7], dtype=torch.uint8), 4, 3).tolist()
    [1, -1, 7]
    """
    if bits == 8:
        return codes.view(torch.int8)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[..., :numel]
    return (nibbles ^ 8).view(torch.int8) - 8
