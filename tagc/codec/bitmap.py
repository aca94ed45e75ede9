"""The index: one bit per element, bit ``i % 8`` of byte ``i // 8`` (least significant first)."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec.sizes import bitmap_bytes as bitmap_bytes


def _bit_weights(device: torch.device) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a mask into bytes.

    mask: bool [..., N]. Returns uint8 [..., ceil(N/8)]; unused bits of the last byte are 0. Cost: one pass. Host
    syncs: none. Exactness: bitwise.

    >>> pack_bits(torch.tensor([True, False, True, False, False, False, False, False, True])).tolist()
    [5, 1]
    """
    numel = mask.shape[-1]
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, bitmap_bytes(numel) * 8 - numel))
    return (padded.unflatten(-1, (-1, 8)) * _bit_weights(mask.device)).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(index: Tensor, numel: int) -> Tensor:
    """Invert :func:`pack_bits`.

    index: uint8 [..., ceil(numel/8)]. Returns bool [..., numel].

    >>> unpack_bits(torch.tensor([5, 1], dtype=torch.uint8), 9).nonzero().flatten().tolist()
    [0, 2, 8]
    """
    return ((index.unsqueeze(-1) & _bit_weights(index.device)) != 0).flatten(-2)[..., :numel]


def or_bitmaps(index_WB: Tensor) -> Tensor:
    """The union of several indices: uint8 [W, B] -> uint8 [B].

    A bit set by several ranks stays one bit. (Adding the bytes instead carries into the neighbour: see README,
    "Differences from the papers".)

    >>> or_bitmaps(torch.tensor([[1], [1], [4]], dtype=torch.uint8)).tolist()
    [5]
    """
    union = index_WB[0].clone()
    for row in index_WB[1:]:
        union |= row
    return union
