"""Launchers of the sketch's encoder: the contract's ``add_residual`` and ``encode_sketch``.

Shape letters: W ranks, N elements of one shard, B = ceil(N/8) bytes, S sketch cells of one shard, T tiles.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.codec.hashing import HASH_ROWS, HashTable, SketchLayout
from tagc.kernels.reference import EncodedSketch
from tagc.kernels.triton import launch, sketch_kernels


def lane_tile(layout: SketchLayout) -> tuple[int, int]:
    """(cells, lanes) that one program sums: all lanes, rounded up to a power of two, and as many cells as fit."""
    lanes = triton.next_power_of_2(layout.lanes)
    return launch.CELL_TILE_ELEMENTS // lanes, lanes


def add_residual(gradient_WN: Tensor, carry_WN: Tensor, owed_WB: Tensor, decay: float) -> Tensor:
    """As :func:`tagc.kernels.reference.add_residual`. Cost: one pass. Host syncs: none. Exactness: bitwise."""
    ranks, numel = gradient_WN.shape
    launch.check_numel(numel)
    launch.check_tensors(
        gradient=(gradient_WN, (torch.float32,), (ranks, numel)),
        carry=(carry_WN, launch.STATE_DTYPES, (ranks, numel)),
        owed=(owed_WB, (torch.uint8,), (ranks, bitmap_bytes(numel))),
    )
    grid = (triton.cdiv(numel, launch.ELEMENT_TILE), ranks)
    sketch_kernels.add_owed[grid](
        gradient_WN,
        carry_WN,
        owed_WB,
        float(decay),
        numel,
        bitmap_bytes(numel),
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    return gradient_WN


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
    """As :func:`tagc.kernels.reference.encode_sketch`, all shards in two launches.

    Cost: gradient and carry are read once and carry is written once; the sketch reads the carry three times, through
    the L2 cache where a bucket fits it. Host syncs: none. Exactness: masks, state and cells bitwise.
    """
    ranks, numel = gradient_WN.shape
    index_bytes, device = bitmap_bytes(numel), gradient_WN.device
    launch.check_numel(numel)
    launch.check_tensors(
        gradient=(gradient_WN, (torch.float32,), (ranks, layout.numel)),
        carry=(carry_WN, launch.STATE_DTYPES, (ranks, numel)),
        owed=(owed_WB, (torch.uint8,), (ranks, index_bytes)),
        threshold=(threshold_W1, (torch.float32,), tuple(threshold_W1.shape)),
        **launch.name_table(layout, table),
    )
    launch.check_wire(wire_dtype)
    tiles = triton.cdiv(numel, launch.ELEMENT_TILE)
    stride = launch.threshold_stride(threshold_W1, ranks)
    index_WB = torch.empty(ranks, index_bytes, dtype=torch.uint8, device=device)
    own_N = torch.empty(numel, device=device)
    kept_WT = torch.empty(ranks, tiles, dtype=torch.int32, device=device)
    squares_WT = torch.empty(ranks, tiles, device=device)
    carry_is_exact = carry_WN.dtype == torch.float32
    sketch_kernels.select_sketch[(tiles, ranks)](
        gradient_WN,
        carry_WN,
        owed_WB,
        threshold_W1,
        index_WB,
        own_N,
        kept_WT,
        squares_WT,
        float(decay),
        rank,
        numel,
        index_bytes,
        stride,
        HAS_DECAY=decay != 0,
        STORE_X=decay != 0 and not carry_is_exact,
        ERROR_FEEDBACK=error_feedback,
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    cells_WS = torch.empty(ranks, layout.sketch_numel, dtype=wire_dtype, device=device)
    cell_tile, lanes = lane_tile(layout)
    sketch_kernels.gather_cells[(triton.cdiv(layout.cells, cell_tile), HASH_ROWS, ranks)](
        carry_WN if carry_is_exact else gradient_WN,
        threshold_W1,
        table.rows_HCK,
        table.sign_HR,
        cells_WS,
        rank,
        numel,
        layout.rows,
        layout.cells,
        table.rows_HCK.shape[2],
        stride,
        LANES=layout.lanes,
        LANE_TILE=lanes,
        CELL_TILE=cell_tile,
        **launch.OPTIONS,
    )
    return EncodedSketch(index_WB, cells_WS, own_N, kept_WT.sum(dim=1), squares_WT.sum())
