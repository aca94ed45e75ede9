"""Own values behind an own index: the k-th set bit of a shard's index belongs to the k-th packed value.

The message has a fixed size, ``capacity`` values per shard, so that nobody needs to be told how long it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec.sizes import plan_capacity as plan_capacity


def limit_selection(mask: Tensor, capacity: int) -> Tensor:
    """The first ``capacity`` set elements along the last dimension. mask: bool [..., N]. Host syncs: none.

    >>> limit_selection(torch.tensor([True, False, True, True]), 2).tolist()
    [True, False, True, False]
    """
    return mask & (mask.cumsum(-1) <= capacity)


def pack_values(x: Tensor, sent: Tensor, capacity: int) -> Tensor:
    """Move the selected elements to the front, in order of position.

    x: [..., N] of any dtype; sent: bool [..., N], at most ``capacity`` set in each last dimension. Returns
    [..., capacity], zero behind the last selected value. Host syncs: none. Exactness: bitwise.

    >>> pack_values(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([True, False, True]), 4).tolist()
    [5.0, 7.0, 0.0, 0.0]
    """
    place = torch.where(sent, sent.cumsum(-1) - 1, capacity)  # what is not sent goes to a column that is cut off
    return x.new_zeros(*x.shape[:-1], capacity + 1).scatter_(-1, place, x)[..., :capacity].contiguous()


def unpack_values(values: Tensor, sent: Tensor) -> Tensor:
    """Invert :func:`pack_values`: zeros where nothing was sent.

    values: [..., capacity]; sent: bool [..., N]. Returns [..., N]. Host syncs: none. Exactness: bitwise.

    >>> unpack_values(torch.tensor([5.0, 7.0, 0.0, 0.0]), torch.tensor([True, False, True])).tolist()
    [5.0, 0.0, 7.0]
    """
    capacity = values.shape[-1]
    place = torch.where(sent, sent.cumsum(-1) - 1, capacity).clamp(max=capacity)
    return torch.nn.functional.pad(values, (0, 1)).gather(-1, place)
