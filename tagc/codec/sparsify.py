"""Which values to send: thresholds on the magnitude for a target density.

Each estimator takes values [..., N] and the share to keep, and returns one threshold per last dimension, [..., 1],
without waiting for the device. A bucket [W, N] gets a threshold per destination shard, since every shard's sketch has
the same room: token embeddings are sorted by frequency, so one threshold for all would fill the first shard's sketch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tagc.codec.hashing import mix64


def count_kept(numel: int, density: float) -> int:
    """How many of ``numel`` values are to be kept: at least one."""
    return min(max(1, round(density * numel)), numel)


def threshold_exact(x: Tensor, density: float) -> Tensor:
    """The k-th largest magnitude, k = round(density * N), at least 1. x: float32 [..., N], N >= 1.

    >>> threshold_exact(torch.tensor([[1.0, -4.0, 3.0, 0.5], [2.0, 0.0, 0.0, 0.0]]), 0.5).tolist()
    [[3.0], [0.0]]
    """
    numel = x.shape[-1]
    return x.abs().kthvalue(numel - count_kept(numel, density) + 1, dim=-1, keepdim=True).values


def draw_positions(numel: int, sample: int, shift: int, device: torch.device) -> Tensor:
    """Positions of a sample of a shard, for a quantile of the values there; all of them where ``sample`` is no less.

    One in each of ``sample`` equal parts of the shard, at a place that looks random, and all moved on by ``shift``
    around the end: every position is as likely as any other, rows of zeros count by their share, and memory is read
    almost in order. The quantile keeps a share p with a standard deviation of at most sqrt(p (1 - p) / sample): 0.22
    points at p = 0.2, 32,768 positions. numel >= 1. Returns int64 [min(sample, numel)]. Host syncs: one copy to the
    device when a size is first met. Exactness: the same integers on every machine.

    >>> draw_positions(10, 5, 0, torch.device("cpu")).tolist(), draw_positions(4, 9, 1, torch.device("cpu")).tolist()
    ([1, 2, 4, 7, 9], [1, 2, 3, 0])
    """
    moved = _spread_positions(numel, min(sample, numel), device) + shift % numel
    return torch.where(moved < numel, moved, moved - numel)


@lru_cache(maxsize=64)
def _spread_positions(numel: int, parts: int, device: torch.device) -> Tensor:
    """A position in each of ``parts`` equal parts, ascending."""
    start = torch.arange(parts + 1) * numel // parts
    draw = mix64(torch.arange(parts)) & 0x7FFFFFFF
    return (start[:-1] + (draw * start.diff() >> 31)).to(device)


def threshold_lognormal(x: Tensor, density: float) -> Tensor:
    """The quantile of a log-normal fitted to the non-zero magnitudes (TAGC, arXiv 2504.05638).

    Zeros (embedding rows of absent tokens) are left out of the fit, and the quantile is moved so that ``density``
    still counts all elements. Gives 0, which keeps every non-zero, where the non-zeros are no more than wanted.
    """
    magnitude = x.abs()
    nonzero = magnitude > 0
    total = nonzero.sum(-1, keepdim=True)
    log = torch.where(nonzero, magnitude, 1.0).log()
    mean = log.sum(-1, keepdim=True) / total.clamp(min=1)
    squares = torch.where(nonzero, log - mean, 0.0).square().sum(-1, keepdim=True)
    deviation = (squares / (total - 1).clamp(min=1)).sqrt()
    share = (density * x.shape[-1] / total.clamp(min=1)).clamp(max=1.0)
    quantile = (mean + deviation * torch.special.ndtri(1.0 - share)).exp()
    # A long lower tail widens the fit; a threshold over the maximum would leave nothing to send, at every step.
    return torch.where(share < 1.0, quantile.minimum(magnitude.amax(-1, keepdim=True)), 0.0)


def select_values(x: Tensor, threshold: Tensor) -> Tensor:
    """Mask of what to send: non-zero values whose magnitude reaches the threshold. x: [..., N]; threshold: [..., 1].

    >>> select_values(torch.tensor([0.0, -2.0, 1.0]), torch.tensor([0.0])).tolist()
    [False, True, True]
    """
    return (x.abs() >= threshold) & (x != 0)
