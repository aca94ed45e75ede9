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


class Peeling:
    """The state of one decode: bits of the union and of what is unresolved by row, pure lanes by cell, and values."""

    def __init__(self, cells_S: Tensor, layout: SketchLayout, table: HashTable) -> None:
        width, device = row_bytes(layout.lanes), cells_S.device
        self.peers_RP = torch.empty(layout.rows, width, dtype=torch.uint8, device=device)
        self.open_RP = torch.empty_like(self.peers_RP)
        self.value_N = torch.empty(layout.numel, device=device)  # written where an element is resolved or estimated
        self._pure_FP = torch.empty(HASH_ROWS * layout.cells, width, dtype=torch.uint8, device=device)
        self._layout, self._rows_HCK, self._shape = layout, table.rows_HCK, {"LANES": layout.lanes, "ROW_BYTES": width}
        self._tables = (cells_S, table.cell_HR, table.rows_HCK, table.sign_HR)
        self._sizes = (layout.rows, layout.cells, table.rows_HCK.shape[2])
        self._by_rows = self._shape | {"ROW_TILE": launch.PEEL_BYTES // width} | launch.OPTIONS
        self._grid = (triton.cdiv(layout.rows, self._by_rows["ROW_TILE"]),)

    def load(self, index_B: Tensor) -> None:
        """Start from the union of the peers."""
        sizes = (self._layout.numel, self._layout.rows)
        peel_kernels.spread_index[self._grid](index_B, self.peers_RP, self.open_RP, *sizes, **self._by_rows)

    def run_rounds(self, launched: int, limit: int) -> None:
        """Peel: ``launched`` rounds over the whole device, then each byte of lanes alone up to round ``limit``."""
        state = (*self._tables, self._pure_FP, self.peers_RP, self.open_RP, self.value_N, *self._sizes)
        open_words, pure_words = view_words(self.open_RP), view_words(self._pure_FP)
        all_cells, words = pure_words.shape
        tile = launch.PEEL_WORDS // words
        grid = (triton.cdiv(all_cells, tile),)
        sizes = (self._layout.rows, all_cells, self._rows_HCK.shape[2])
        for _ in range(launched):
            peel_kernels.find_pure[grid](
                open_words, self._rows_HCK, pure_words, *sizes, WORDS=words, CELL_TILE=tile, **launch.OPTIONS
            )
            peel_kernels.peel_rows[self._grid](*state, **self._by_rows)
        rest = self._shape | {"TILE": launch.COLUMN_TILE} | launch.COLUMN_OPTIONS
        peel_kernels.peel_columns[(self.open_RP.shape[1],)](*state, limit - launched, **rest)

    def estimate(self) -> None:
        """Give what is unresolved the median of its three cells."""
        state = (*self._tables, self.peers_RP, self.open_RP, self.value_N, *self._sizes)
        peel_kernels.estimate_rows[self._grid](*state, **self._by_rows)


def decode_sketch(
    index_B: Tensor, cells_S: Tensor, own_N: Tensor, *, layout: SketchLayout, table: HashTable, estimate: bool
) -> DecodedSketch:
    """As :func:`tagc.kernels.reference.decode_sketch`, with MAX_ROUNDS rounds at most and the same sets.

    The first LAUNCHED_ROUNDS rounds are two launches each, over the whole device; at loads up to 0.7 they end it. One
    launch runs what is left. Host syncs: none. Exactness: masks and counts bitwise, also where the rounds run out;
    values up to the order of subtractions.
    """
    launch.check_numel(layout.numel)
    launch.check_tensors(
        cells=(cells_S, (torch.float32,), (layout.sketch_numel,)),
        index=(index_B, (torch.uint8,), (bitmap_bytes(layout.numel),)),
        own=(own_N, (torch.float32,), (layout.numel,)),
        **launch.name_table(layout, table),
    )
    peeling = Peeling(cells_S, layout, table)
    peeling.load(index_B)
    peeling.run_rounds(min(launch.LAUNCHED_ROUNDS, MAX_ROUNDS), MAX_ROUNDS)
    if estimate:
        peeling.estimate()
    return _finish(index_B, own_N, peeling, layout, estimate)


def _finish(index_B: Tensor, own_N: Tensor, peeling: Peeling, layout: SketchLayout, estimate: bool) -> DecodedSketch:
    unresolved_B = torch.empty_like(index_B)
    tiles = triton.cdiv(layout.numel, launch.ELEMENT_TILE)
    count_3T = torch.empty(3, tiles, dtype=torch.int32, device=own_N.device)
    peel_kernels.finish_peeling[(tiles,)](
        index_B,
        own_N,
        peeling.open_RP,
        peeling.value_N,
        unresolved_B,
        count_3T,
        layout.numel,
        index_B.numel(),
        LANES=layout.lanes,
        ROW_BYTES=peeling.open_RP.shape[1],
        ESTIMATE=estimate,
        TILE=launch.ELEMENT_TILE,
        **launch.OPTIONS,
    )
    union, peers_union, unresolved = count_3T.sum(dim=1).unbind()
    return DecodedSketch(own_N, union, peers_union, unresolved_B, unresolved)
