"""Launchers of packed values: the contract's ``encode_packed`` and ``decode_packed``.

Shape letters: W ranks, N elements of one shard, B = ceil(N/8) bytes, C capacity of a message, T tiles of a shard.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.kernels.reference import DecodedPacked, EncodedPacked
from tagc.kernels.triton import launch, packed_kernels

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


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
    """As :func:`tagc.kernels.reference.encode_packed`, all shards in two launches with a scan of tile counts between.

    Cost: gradient and residual are read once and the residual is written once; selected values pass through the
    gradient's memory, which is overwritten. Host syncs: none. Exactness: bitwise.
    """
    ranks, numel = gradient_WN.shape
    index_bytes, device = bitmap_bytes(numel), gradient_WN.device
    launch.check_numel(numel)
    launch.check_tensors(
        gradient=(gradient_WN, (torch.float32,), (ranks, numel)),
        residual=(residual_WN, launch.STATE_DTYPES, (ranks, numel)),
        threshold=(threshold_W1, (torch.float32,), tuple(threshold_W1.shape)),
    )
    launch.check_wire(wire_dtype)
    tiles = triton.cdiv(numel, launch.ELEMENT_TILE)
    index_WB = torch.empty(ranks, index_bytes, dtype=torch.uint8, device=device)
    values_WC = torch.zeros(ranks, capacity, dtype=wire_dtype, device=device)
    own_N = torch.empty(numel, device=device)
    count_WT = torch.empty(ranks, tiles, dtype=torch.int32, device=device)
    squares_WT = torch.empty(ranks, tiles, device=device)
    packed_kernels.select_packed[(tiles, ranks)](
        gradient_WN,
        residual_WN,
        threshold_W1,
        index_WB,
        own_N,
        count_WT,
        squares_WT,
        float(decay),
        rank,
        numel,
        index_bytes,
        launch.threshold_stride(threshold_W1, ranks),
        HAS_DECAY=decay != 0,
        ERROR_FEEDBACK=error_feedback,
        WIRE=TRITON_DTYPES[wire_dtype],
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    end_WT = count_WT.cumsum(dim=1)
    packed_kernels.place_packed[(tiles, ranks)](
        gradient_WN,
        residual_WN,
        index_WB,
        count_WT,
        end_WT,
        squares_WT,
        values_WC,
        rank,
        numel,
        index_bytes,
        capacity,
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    kept_W = end_WT[:, -1].clamp(max=capacity)
    kept_W[rank] = end_WT[rank, -1]  # the own shard has no limit
    return EncodedPacked(index_WB, values_WC, own_N, kept_W, squares_WT.sum())


def decode_packed(index_WB: Tensor, values_WC: Tensor, own_N: Tensor) -> DecodedPacked:
    """As :func:`tagc.kernels.reference.decode_packed`, in two launches with a scan of tile counts between.

    Cost: every index is read twice, everything else once. Host syncs: none. Exactness: bitwise.
    """
    ranks, numel, device = len(index_WB), own_N.numel(), own_N.device
    index_bytes, capacity = bitmap_bytes(numel), values_WC.shape[-1]
    launch.check_numel(numel)
    launch.check_tensors(
        index=(index_WB, (torch.uint8,), (ranks, index_bytes)),
        values=(values_WC, launch.WIRE_DTYPES, (ranks, capacity)),
        own=(own_N, (torch.float32,), (numel,)),
    )
    tiles = triton.cdiv(numel, launch.ELEMENT_TILE)
    count_WT = torch.empty(ranks, tiles, dtype=torch.int32, device=device)
    union_T = torch.empty(tiles, dtype=torch.int32, device=device)
    packed_kernels.count_index[(tiles, ranks)](
        index_WB, count_WT, index_bytes, BYTES=launch.ELEMENT_TILE // 8, **launch.OPTIONS
    )
    packed_kernels.add_packed[(tiles,)](
        index_WB,
        values_WC,
        own_N,
        count_WT,
        count_WT.cumsum(dim=1),
        union_T,
        ranks,
        numel,
        index_bytes,
        capacity,
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    return DecodedPacked(own_N, union_T.sum())
