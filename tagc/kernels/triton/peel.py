"""Launcher of the sketch's decoder: the contract's ``decode_sketch`` in a fixed number of launches.

Shape letters: N elements of a shard, B = ceil(N/8) bytes, S sketch cells, R rows, P bytes of a row's lanes, T tiles.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.codec.hashing import HASH_ROWS, HashTable, SketchLayout
from tagc.codec.peel import MAX_ROUNDS
from tagc.kernels.reference import DecodedSketch
from tagc.kernels.triton import launch, peel_kernels


def row_bytes(lanes: int) -> int:
    """P: bytes for one bit per lane, a power of two."""
    return triton.next_power_of_2(triton.cdiv(lanes, 8))


def view_words(bits: Tensor) -> Tensor:
    """The same memory in 32-bit words where rows are long enough: fewer and wider loads."""
    return bits.view(torch.int32) if bits.shape[-1] >= 4 else bits


def decode_sketch(
    index_B: Tensor, cells_S: Tensor, own_N: Tensor, *, layout: SketchLayout, table: HashTable, estimate: bool
) -> DecodedSketch:
    """As :func:`tagc.kernels.reference.decode_sketch`, with MAX_ROUNDS rounds at most and the same sets.

    The first LAUNCHED_ROUNDS rounds are two launches each, over the whole device; at loads up to 0.7 they end it. One
    launch runs what is left. Host syncs: none. Exactness: masks and counts bitwise, also where the rounds run out;
    values up to the order of subtractions.
    """
    numel, device = layout.numel, cells_S.device
    launch.check_numel(numel)
    launch.check_tensors(
        index=(index_B, (torch.uint8,), (bitmap_bytes(numel),)),
        cells=(cells_S, (torch.float32,), (layout.sketch_numel,)),
        own=(own_N, (torch.float32,), (numel,)),
    )
    width, depth = row_bytes(layout.lanes), table.rows_HCK.shape[2]
    peers_RP = torch.empty(layout.rows, width, dtype=torch.uint8, device=device)
    open_RP = torch.empty_like(peers_RP)
    pure_FP = torch.empty(HASH_ROWS * layout.cells, width, dtype=torch.uint8, device=device)
    value_N = torch.empty(numel, device=device)
    shape = {"LANES": layout.lanes, "ROW_BYTES": width}
    by_rows = shape | {"ROW_TILE": launch.PEEL_BYTES // width} | launch.OPTIONS
    grid = (triton.cdiv(layout.rows, by_rows["ROW_TILE"]),)
    peel_kernels.spread_index[grid](index_B, peers_RP, open_RP, numel, layout.rows, **by_rows)
    state = (cells_S, table.cell_HR, table.rows_HCK, table.sign_HR, pure_FP, peers_RP, open_RP, value_N)
    sizes = (layout.rows, layout.cells, depth)
    for _ in range(launch.LAUNCHED_ROUNDS):
        find_pure(open_RP, pure_FP, layout, table)
        peel_kernels.peel_rows[grid](*state, *sizes, **by_rows)
    peel_kernels.peel_columns[(width,)](
        *state,
        *sizes,
        MAX_ROUNDS - launch.LAUNCHED_ROUNDS,
        **shape,
        TILE=launch.COLUMN_TILE,
        **launch.COLUMN_OPTIONS,
    )
    if estimate:
        without_pure = (*state[:4], *state[5:])
        peel_kernels.estimate_rows[grid](*without_pure, *sizes, **by_rows)
    return _finish(index_B, own_N, open_RP, value_N, layout, estimate)


def find_pure(open_RP: Tensor, pure_FP: Tensor, layout: SketchLayout, table: HashTable) -> None:
    """Mark the lanes of every cell that exactly one unresolved element hits."""
    words = view_words(open_RP)
    all_cells, tile = HASH_ROWS * layout.cells, launch.PEEL_WORDS // words.shape[1]
    peel_kernels.find_pure[(triton.cdiv(all_cells, tile),)](
        words,
        table.rows_HCK,
        view_words(pure_FP),
        layout.rows,
        all_cells,
        table.rows_HCK.shape[2],
        WORDS=words.shape[1],
        CELL_TILE=tile,
        **launch.OPTIONS,
    )


def _finish(
    index_B: Tensor, own_N: Tensor, open_RP: Tensor, value_N: Tensor, layout: SketchLayout, estimate: bool
) -> DecodedSketch:
    unresolved_B = torch.empty_like(index_B)
    tiles = triton.cdiv(layout.numel, launch.ELEMENT_TILE)
    count_3T = torch.empty(3, tiles, dtype=torch.int32, device=own_N.device)
    peel_kernels.finish_peeling[(tiles,)](
        index_B,
        own_N,
        open_RP,
        value_N,
        unresolved_B,
        count_3T,
        layout.numel,
        index_B.numel(),
        LANES=layout.lanes,
        ROW_BYTES=open_RP.shape[1],
        ESTIMATE=estimate,
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    union, peers_union, unresolved = count_3T.sum(dim=1).unbind()
    return DecodedSketch(own_N, union, peers_union, unresolved_B, unresolved)
