"""Random-sign Hadamard rotation of blocks: it spreads outliers, so that few levels fit all elements of a block.

The rotated block is ``H (s * x) / sqrt(B)`` with H the B x B Hadamard matrix in Sylvester's order and s one sign for
each place in a block, the same for all blocks, drawn from a seed. The rotation is orthogonal, so sums and squared
errors are those of the values themselves.

Shape letters: K blocks, B elements of a block, a power of two.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from tagc.codec.hashing import mix64


@lru_cache(maxsize=64)
def draw_signs(block: int, seed: int) -> Tensor:
    """float32 [B]: +1 or -1, from the lowest bit of ``mix64(place ^ mix64(seed))``.

    Errors: ``ValueError`` unless ``block`` is a power of two.
    """
    if block < 1 or block & (block - 1):
        raise ValueError(f"block={block} cannot be rotated: it must be a power of two")
    return 1.0 - 2.0 * (mix64(torch.arange(block) ^ mix64(torch.tensor(seed))) & 1).float()


def _transform(x_KB: Tensor) -> Tensor:
    """Hadamard transform of every row over sqrt(B): pairs at distance 1, 2, 4, ... become sum and difference."""
    blocks, block = x_KB.shape
    distance = 1
    while distance < block:
        pairs = x_KB.view(blocks, block // (2 * distance), 2, distance)
        x_KB = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2).view(
            blocks, block
        )
        distance *= 2
    return x_KB * torch.tensor(1 / math.sqrt(block))


def rotate_blocks(x_KB: Tensor, seed: int) -> Tensor:
    """float32 [K, B] -> float32 [K, B]. Cost: log2(B) passes. Exactness: bitwise.

    >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> torch.equal(unrotate_blocks(rotate_blocks(x, 0), 0), x)
    True
    """
    return _transform(x_KB * draw_signs(x_KB.shape[1], seed).to(x_KB.device))


def unrotate_blocks(x_KB: Tensor, seed: int) -> Tensor:
    """Invert :func:`rotate_blocks`, up to rounding."""
    return _transform(x_KB) * draw_signs(x_KB.shape[1], seed).to(x_KB.device)
