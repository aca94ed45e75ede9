"""The reference backend: the codec put together in plain PyTorch, on any device. It defines the contract.

Shape letters: W ranks, N elements of one shard, B = ceil(N/8) bytes, S sketch cells of one shard.

A sender's state is ``carry`` and ``owed``: the last step's values, and a bitmap of those among them that have not been
applied yet. The residual is ``carry`` where ``owed``. So a value that comes back unresolved needs one bit, no copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tagc.codec.bitmap import pack_bits, unpack_bits
from tagc.codec.hashing import HashTable, SketchLayout
from tagc.codec.peel import peel_sketch
from tagc.codec.sketch import sketch_values
from tagc.codec.sparsify import select_values, threshold_exact, threshold_lognormal, threshold_sampled

__all__ = [
    "DecodedSketch",
    "EncodedSketch",
    "add_residual",
    "decode_sketch",
    "encode_sketch",
    "threshold_exact",
    "threshold_lognormal",
    "threshold_sampled",
]


class EncodedSketch(NamedTuple):
    """What one rank sends for a bucket, and what it keeps for itself."""

    index_WB: Tensor  # uint8: positions sent to each peer; the own row is zero
    cells_WS: Tensor  # wire dtype: sketch for each peer; the own row is zero
    own_N: Tensor  # float32: the own shard's selected values, zero elsewhere
    kept_W: Tensor  # int64: elements selected for each shard, the own included
    residual_squared: Tensor  # float32 scalar: squared norm of the new residual, before returns


class DecodedSketch(NamedTuple):
    """What an owner recovered."""

    total_N: Tensor  # float32: sum over ranks; at unresolved positions the own value alone, or with an estimate
    union: Tensor  # int64 scalar: positions that any rank selected
    peers_union: Tensor  # int64 scalar: positions that any peer selected: what the sketch held
    unresolved_B: Tensor  # uint8 bitmap of positions that peeling could not separate
    unresolved: Tensor  # int64 scalar: their number


def add_residual(gradient_WN: Tensor, carry_WN: Tensor, owed_WB: Tensor, decay: float) -> Tensor:
    """``gradient + decay * residual``, in the gradient's memory. Exactness: one rounding per element."""
    owed = unpack_bits(owed_WB, gradient_WN.shape[-1])
    return gradient_WN.add_(torch.where(owed, carry_WN, 0.0), alpha=decay)


def encode_sketch(
    gradient_WN: Tensor,
    carry_WN: Tensor,
    owed_WB: Tensor,
    threshold_W1: Tensor,
    *,
    decay: float,
    rank: int,
    layout: SketchLayout,
    table: HashTable,
    wire_dtype: torch.dtype,
    error_feedback: bool,
) -> EncodedSketch:
    """Add the residual, select, keep the rest, and sketch what is sent, for every shard of a bucket.

    gradient_WN: float32, may be overwritten; carry_WN (float32) and owed_WB become the new state; ``decay=0`` ignores
    the old one. threshold_W1: float32, or [1] for all shards. Host syncs: none. Exactness: masks and state bitwise;
    cells are summed in the table's order in fp32, then rounded once to the wire dtype.
    """
    x_WN = add_residual(gradient_WN, carry_WN, owed_WB, decay) if decay else gradient_WN
    mask = select_values(x_WN, threshold_W1)
    kept_W = mask.sum(dim=1)
    carry_WN.copy_(x_WN)
    owed_WB.copy_(pack_bits(~mask)) if error_feedback else owed_WB.zero_()
    rest_WN = torch.where(mask, 0.0, x_WN) if error_feedback else x_WN.new_zeros(1)
    own_N = torch.where(mask[rank], x_WN[rank], 0.0)
    mask[rank] = False  # the owner's own values never travel
    cells_WS = x_WN.new_zeros(len(mask), layout.sketch_numel, dtype=wire_dtype)
    for w in range(len(mask)):
        if w != rank:
            cells_WS[w] = sketch_values(torch.where(mask[w], x_WN[w], 0.0), layout, table).flatten()
    return EncodedSketch(pack_bits(mask), cells_WS, own_N, kept_W, rest_WN.square().sum())


def decode_sketch(
    index_B: Tensor, cells_S: Tensor, own_N: Tensor, *, layout: SketchLayout, table: HashTable, estimate: bool
) -> DecodedSketch:
    """Peel the peers' sum and add the own values.

    index_B: uint8, OR of the peers' indices; cells_S: float32, sum of their sketches; own_N may be overwritten.
    ``estimate`` adds the median of the three cells where peeling fails. Host syncs: one per round of peeling.
    """
    peers_N = unpack_bits(index_B, layout.numel)
    union = (peers_N | (own_N != 0)).sum()
    peeled = peel_sketch(cells_S.view(-1, layout.cells, layout.lanes), peers_N, layout, table)
    total_N = own_N
    total_N[peeled.position_E] += peeled.value_E if estimate else torch.where(peeled.resolved_E, peeled.value_E, 0.0)
    unresolved_N = torch.zeros_like(peers_N)
    unresolved_N[peeled.position_E] = ~peeled.resolved_E
    return DecodedSketch(total_N, union, peers_N.sum(), pack_bits(unresolved_N), unresolved_N.sum())
