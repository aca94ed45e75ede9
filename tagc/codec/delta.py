"""Differences of weights to a replica, as integers with one bfloat16 scale per block (SDP4Bit, section 4.1).

Every rank adds what was sent to its replica, the owner, too, so that replicas stay equal; what rounding misses is part
of the next difference. With ``rotate`` every block is rotated before rounding (:mod:`tagc.codec.rotate`).

Shape letters: N elements, K = ceil(N / block) blocks, B elements of a block, M bytes of codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec.quantize import dequantize_blocks, largest_code, unpack_codes
from tagc.codec.rotate import rotate_blocks, unrotate_blocks
from tagc.codec.sizes import block_count, coded_numel
from tagc.codec.sizes import delta_bytes as delta_bytes


def round_scale_up(scale: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below ``scale`` (float32, not negative), so that no code is clipped."""
    up = (scale.contiguous().view(torch.int32) + 0xFFFF) & -0x10000
    return torch.where(scale.isfinite(), up.view(torch.float32), torch.nan).to(torch.bfloat16)


def quantize_delta(delta_N: Tensor, bits: int, block: int, rotate: int | None) -> tuple[Tensor, Tensor]:
    """Round every block to multiples of its scale, to nearest, half to even.

    delta_N: float32. Returns q int8 [:func:`coded_numel`] and scales bfloat16 [K]: the largest magnitude over
    ``largest_code``, rounded up. A block that holds NaN or Inf has the scale NaN and codes 0, a zero block scale 0.
    Cost: three passes. Host syncs: none. Exactness: bitwise.

    >>> q, scales = quantize_delta(torch.tensor([7.0, -3.6, 0.0, float("inf"), 1.0]), 4, 3, None)
    >>> q.tolist(), scales.tolist()
    ([7, -4, 0, 0, 0], [1.0, nan])
    """
    limit, blocks = largest_code(bits), block_count(len(delta_N), block)
    x_KB = torch.nn.functional.pad(delta_N, (0, blocks * block - len(delta_N))).view(blocks, block)
    if rotate is not None:
        x_KB = rotate_blocks(x_KB, rotate)
    scales_K = round_scale_up(x_KB.abs().amax(-1) / limit) if blocks else delta_N.new_empty(0, dtype=torch.bfloat16)
    scale_K1 = scales_K.float().unsqueeze(-1)
    q_KB = torch.where(scale_K1 > 0, x_KB / scale_K1, 0.0).round().clamp(-limit, limit)
    return q_KB.to(torch.int8).flatten()[: coded_numel(len(delta_N), block, rotate)].contiguous(), scales_K


def dequantize_delta(
    codes_M: Tensor, scales_K: Tensor, numel: int, bits: int, block: int, rotate: int | None
) -> Tensor:
    """What :func:`quantize_delta` sent, float32 [numel]; NaN where a scale is NaN. Exactness: bitwise."""
    q = unpack_codes(codes_M, bits, coded_numel(numel, block, rotate))
    x = dequantize_blocks(q, scales_K.float(), block)
    return x if rotate is None else unrotate_blocks(x.view(-1, block), rotate).flatten()[:numel]
