"""The reference backend: the codec put together in plain PyTorch, on any device. It defines the contract.

Shape letters: W ranks, N elements of one shard, B = ceil(N/8) bytes, S sketch cells of one shard, C packed values of
one shard, M = ceil(N * bits / 8) bytes of codes and K = ceil(N / block) scales of one shard.

The state of a sender of sketches is ``carry`` and ``owed``: the last step's values, and a bitmap of those among them
that have not been applied yet. The residual is ``carry`` where ``owed``. So a value that comes back unresolved needs
one bit, no copy. The other senders keep the residual itself.

State may be stored in float32 or bfloat16; it is read as, and computed in, fp32 and rounded to nearest even when
stored. Squared norms are of the values before that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tagc.codec.bitmap import pack_bits, unpack_bits
from tagc.codec.delta import dequantize_delta, quantize_delta
from tagc.codec.hashing import HashTable, SketchLayout
from tagc.codec.packed import limit_selection, pack_values, unpack_values
from tagc.codec.peel import peel_sketch
from tagc.codec.quantize import dequantize_blocks, pack_codes, quantize_blocks, unpack_codes
from tagc.codec.sketch import sketch_values
from tagc.codec.sparsify import select_values, threshold_exact, threshold_lognormal

__all__ = [
    "DecodedPacked",
    "DecodedSketch",
    "EncodedBlocks",
    "EncodedDelta",
    "EncodedPacked",
    "EncodedSketch",
    "add_residual",
    "apply_delta",
    "decode_blocks",
    "decode_packed",
    "decode_sketch",
    "encode_blocks",
    "encode_delta",
    "encode_packed",
    "encode_sketch",
    "sample_values",
    "threshold_exact",
    "threshold_lognormal",
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


class EncodedPacked(NamedTuple):
    """What one rank sends for a bucket, and what it keeps for itself."""

    index_WB: Tensor  # uint8: positions sent to each peer; the own row is zero
    values_WC: Tensor  # wire dtype: their values in order of position, then zeros; the own row is zero
    own_N: Tensor  # float32: the own shard's selected values, zero elsewhere
    kept_W: Tensor  # int64: elements sent to each shard's owner, or applied to the own shard
    residual_squared: Tensor  # float32 scalar: squared norm of the new residual


class DecodedPacked(NamedTuple):
    """The sum over ranks."""

    total_N: Tensor  # float32
    union: Tensor  # int64 scalar: positions that any rank sent or applied


class EncodedBlocks(NamedTuple):
    """What one rank sends for a bucket, and what it keeps for itself."""

    codes_WM: Tensor  # uint8: integers of every element for each peer; the own row is zero
    scales_WK: Tensor  # float32: one scale per block; the own row is zero
    own_N: Tensor  # float32: the own shard as it is; may lie in the gradient's memory
    residual_squared: Tensor  # float32 scalar: squared norm of the new residual


class EncodedDelta(NamedTuple):
    """What the owner of a shard sends of its weights."""

    codes_M: Tensor  # uint8
    scales_K: Tensor  # bfloat16; NaN for a block that holds NaN or Inf


def add_residual(gradient_WN: Tensor, carry_WN: Tensor, owed_WB: Tensor, decay: float) -> Tensor:
    """``gradient + decay * residual``, in the gradient's memory. Exactness: one rounding per element."""
    owed = unpack_bits(owed_WB, gradient_WN.shape[-1])
    return gradient_WN.add_(torch.where(owed, carry_WN, 0.0).float(), alpha=decay)


def sample_values(
    gradient_WN: Tensor, state_WN: Tensor, owed_WB: Tensor | None, position_K: Tensor, decay: float
) -> Tensor:
    """``gradient + decay * residual`` at the positions given, the same in every shard, without a pass over the rest.

    state_WN: the carry with ``owed_WB``, or the residual itself with None; nothing is changed. ``decay=0`` ignores
    it. position_K: int64, each in [0, N). Returns float32 [W, K]. Host syncs: none. Exactness: bitwise what an encoder
    computes there.

    >>> state, owed = torch.tensor([[10.0, 20.0, 30.0]]), torch.tensor([[4]], dtype=torch.uint8)
    >>> sample_values(torch.tensor([[1.0, 2.0, 3.0]]), state, owed, torch.tensor([2, 0]), 0.5).tolist()
    [[18.0, 1.0]]
    """
    x_WK = gradient_WN.index_select(1, position_K)
    if decay == 0:
        return x_WK
    old_WK = state_WN.index_select(1, position_K).float()
    if owed_WB is not None:
        owed_WK = owed_WB.index_select(1, position_K >> 3) >> (position_K & 7) & 1
        old_WK = torch.where(owed_WK != 0, old_WK, 0.0)
    return x_WK.add_(old_WK, alpha=decay)


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

    gradient_WN: float32, may be overwritten; carry_WN and owed_WB become the new state; ``decay=0`` ignores
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


def encode_packed(
    gradient_WN: Tensor,
    residual_WN: Tensor,
    threshold_W1: Tensor,
    *,
    decay: float,
    rank: int,
    capacity: int,
    wire_dtype: torch.dtype,
    error_feedback: bool,
) -> EncodedPacked:
    """Add the residual, select, and pack what is sent to every peer: ``capacity`` values at most, by position.

    gradient_WN: float32, may be overwritten; residual_WN becomes the new residual; ``decay=0`` ignores the old one.
    threshold_W1: float32, or [1] for all shards. The new residual holds the rounding of what was sent, whole values
    that found no room, and, with ``error_feedback``, what was not selected. The own shard's selected values are
    applied without rounding and without limit. Host syncs: none. Exactness: bitwise.

    >>> residual = torch.zeros(2, 4)
    >>> gradient = torch.tensor([[5.0, 0.0, 1.0, 6.0], [1.0, -4.0, 0.0, 3.0]])
    >>> packed = encode_packed(gradient, residual, torch.tensor([[3.0], [3.0]]), decay=1.0, rank=0, capacity=1,
    ...                        wire_dtype=torch.float32, error_feedback=True)
    >>> packed.index_WB.tolist(), packed.values_WC.tolist(), packed.own_N.tolist(), packed.kept_W.tolist()
    ([[0], [2]], [[0.0], [-4.0]], [5.0, 0.0, 0.0, 6.0], [2, 1])
    >>> residual.tolist()
    [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 3.0]]
    """
    x_WN = gradient_WN.add_(residual_WN.float(), alpha=decay) if decay else gradient_WN
    selected = select_values(x_WN, threshold_W1)
    sent = limit_selection(selected, capacity)
    sent[rank] = False  # the owner's own values never travel
    wire_WN = x_WN.to(wire_dtype)
    own_N = torch.where(selected[rank], x_WN[rank], 0.0)
    applied = sent.clone()
    applied[rank] = selected[rank]
    rest_WN = torch.where(sent, x_WN - wire_WN.float(), torch.where(applied, 0.0, x_WN))
    if not error_feedback:
        rest_WN = torch.where(selected, rest_WN, 0.0)
    residual_WN.copy_(rest_WN)
    values_WC = pack_values(wire_WN, sent, capacity)
    return EncodedPacked(pack_bits(sent), values_WC, own_N, applied.sum(dim=1), rest_WN.square().sum())


def decode_packed(index_WB: Tensor, values_WC: Tensor, own_N: Tensor) -> DecodedPacked:
    """Add the peers' values to the own ones, in rank order, in fp32.

    index_WB and values_WC: row w is what rank w sent, the own row without a set bit; own_N: may be overwritten.
    Host syncs: none. Exactness: bitwise.

    >>> index, values = torch.tensor([[0], [6]], dtype=torch.uint8), torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> total, union = decode_packed(index, values, torch.tensor([0.0, 1.0, 0.0]))
    >>> total.tolist(), union.item()
    ([0.0, 4.0, 4.0], 2)
    """
    union_N = own_N != 0
    total_N = own_N
    for index_B, values_C in zip(index_WB, values_WC, strict=True):
        sent_N = unpack_bits(index_B, own_N.numel())
        total_N += unpack_values(values_C, sent_N).float()
        union_N |= sent_N
    return DecodedPacked(total_N, union_N.sum())


def encode_blocks(
    gradient_WN: Tensor, residual_WN: Tensor, *, decay: float, rank: int, bits: int, block: int
) -> EncodedBlocks:
    """Add the residual and round every peer's shard to integers of ``bits`` bits with a scale per ``block`` elements.

    gradient_WN: float32, may be overwritten; residual_WN becomes the new residual, ``x - q * scale`` with the product
    rounded to fp32 first, as the owner adds it; ``decay=0`` ignores the old one. bits: 8 or 4. A block that holds NaN
    or Inf is sent as zeros and stays in the residual. Host syncs: none. Exactness: bitwise.

    >>> residual = torch.zeros(2, 3)
    >>> blocks = encode_blocks(torch.tensor([[1.0, 2.0, 3.0], [7.0, 2.25, -0.5]]), residual, decay=1.0, rank=0, bits=4,
    ...                        block=2)
    >>> blocks.codes_WM.tolist(), blocks.scales_WK.tolist(), blocks.own_N.tolist()
    ([[0, 0], [39, 9]], [[0.0, 0.0], [1.0, 0.0714285746216774]], [1.0, 2.0, 3.0])
    >>> residual.tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.25, 0.0]]
    """
    x_WN = gradient_WN.add_(residual_WN.float(), alpha=decay) if decay else gradient_WN
    q_WN, scales_WK = quantize_blocks(x_WN, bits, block)
    q_WN[rank], scales_WK[rank] = 0, 0.0  # the owner's own values never travel
    rest_WN = x_WN - dequantize_blocks(q_WN, scales_WK, block)
    rest_WN[rank] = 0.0
    residual_WN.copy_(rest_WN)
    return EncodedBlocks(pack_codes(q_WN, bits), scales_WK, x_WN[rank], rest_WN.square().sum())


def decode_blocks(codes_WM: Tensor, scales_WK: Tensor, own_N: Tensor, *, bits: int, block: int) -> Tensor:
    """Add the peers' ``q * scale`` to the own values, in rank order, in fp32.

    codes_WM and scales_WK: row w is what rank w sent, the own row zero; own_N: float32 [N], may be overwritten.
    Returns float32 [N]. Host syncs: none. Exactness: bitwise (products and sums are rounded apart).

    >>> codes = torch.tensor([[0, 0], [39, 9]], dtype=torch.uint8)
    >>> decode_blocks(codes, torch.tensor([[0.0, 0.0], [1.0, 0.5]]), torch.ones(3), bits=4, block=2).tolist()
    [8.0, 3.0, -2.5]
    """
    total_N = own_N
    for codes_M, scales_K in zip(codes_WM, scales_WK, strict=True):
        total_N += dequantize_blocks(unpack_codes(codes_M, bits, own_N.numel()), scales_K, block)
    return total_N


def encode_delta(
    target_N: Tensor, replica_N: Tensor, *, bits: int, block: int, rotate: int | None = None
) -> EncodedDelta:
    """Round ``target - replica`` to integers of ``bits`` bits with a bfloat16 scale per ``block`` elements.

    target_N, replica_N: float32 or bfloat16, unchanged; the difference is taken in fp32. bits: 8, 4, 3 or 2. rotate:
    the seed of a random-sign Hadamard rotation of every block, or None; blocks are then powers of two. A block that
    holds NaN or Inf has the scale NaN. Host syncs: none. Exactness: bitwise.

    >>> delta = encode_delta(torch.tensor([8.0, 2.25, 1.0]), torch.tensor([1.0, 0.0, 1.0]), bits=4, block=2)
    >>> delta.codes_M.tolist(), delta.scales_K.tolist()
    ([39, 0], [1.0, 0.0])
    """
    q, scales_K = quantize_delta(target_N.float() - replica_N.float(), bits, block, rotate)
    return EncodedDelta(pack_codes(q, bits), scales_K)


def apply_delta(
    codes_WM: Tensor, scales_WK: Tensor, replica_WN: Tensor, *, bits: int, block: int, rotate: int | None = None
) -> None:
    """Add every owner's difference to the replica, in place and in its dtype, which is the same on all ranks.

    codes_WM and scales_WK: row w is what rank w sent, the own row included; replica_WN: float32 or bfloat16, the sum is
    taken in fp32 and rounded to nearest even. Host syncs: none. Exactness: bitwise.

    >>> replica = torch.tensor([[1.0, 0.0, 1.0]])
    >>> codes, scales = torch.tensor([[39, 0]], dtype=torch.uint8), torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    >>> apply_delta(codes, scales, replica, bits=4, block=2)
    >>> replica.tolist()
    [[8.0, 2.0, 1.0]]
    """
    for codes_M, scales_K, replica_N in zip(codes_WM, scales_WK, replica_WN, strict=True):
        delta_N = dequantize_delta(codes_M, scales_K, len(replica_N), bits, block, rotate)
        replica_N.copy_(replica_N.float() + delta_N)
