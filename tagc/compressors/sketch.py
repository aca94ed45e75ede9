"""``lhc``, ``tagc`` and ``tagc2``: select, sketch, send an index and cells, peel at the owner.

The three differ in configuration only: ``lhc`` sends every non-zero (sparsity 0, all layers), ``tagc`` the largest
values with error feedback in fp32 cells, ``tagc2`` the same in bf16 cells. Sources: arXiv 2402.07529 (LHC),
arXiv 2504.05638 (TAGC), FAIA 260015 (TAGC-2).

The owner keeps its own selected values apart: they never enter a sketch, so its peeling problem holds the union of its
*peers'* indices only (density d instead of 1-(1-d)^2 at two ranks) and its own values are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from zlib import crc32

import torch
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.codec.hashing import HashTable, build_hash_table, plan_layout
from tagc.compressors.base import BucketSpec, BucketStats, Compressor, Kind, Part
from tagc.compressors.dense import dense_bytes
from tagc.config import CompressorConfig

HASH_SEEDS = 8  # hash tables used in turn, so that no pair of rows collides at every step


class Sketch(Compressor):
    """One bucket's residual, hash tables and decision between sketch and dense."""

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        super().__init__(config, spec, kernels)
        self.wire_dtype = getattr(torch, config.value_dtype)
        self.layout = plan_layout(spec.numel, config.ratio)
        self.residual_WN = torch.zeros(spec.ranks, spec.numel, device=spec.device)
        self._seed = crc32(f"{spec.seed}/{spec.name}".encode())
        self._dense_until: float = config.warmup_steps
        self._sent_index_WB: Tensor | None = None
        self._unresolved: Tensor | None = None
        if config.dense_fallback:
            if self._sketch_bytes() > self._dense_bytes():
                self._dense_until = math.inf
            elif config.sparsity == 0:
                self._dense_until = max(self._dense_until, 1)  # the density is unknown until one step has shown it
            elif self._estimate_load(1 - config.sparsity) > config.max_load:
                self._dense_until = math.inf

    # --- decision between sketch and dense ---------------------------------------------------------------------

    def is_dense(self, step: int) -> bool:
        """Whether ``step`` travels dense; the same on every rank."""
        return step < self._dense_until

    def explain_dense(self) -> str | None:
        if self._dense_until != math.inf:
            return None
        if self._sketch_bytes() > self._dense_bytes():
            return (
                f"{self.spec.name}: dense, its sketch would be larger ({self._sketch_bytes()} against "
                f"{self._dense_bytes()} bytes); raise compressor.ratio"
            )
        return (
            f"{self.spec.name}: dense, sparsity {self.config.sparsity} at {self.spec.ranks} ranks loads the sketch to "
            f"{self._estimate_load(1 - self.config.sparsity):.2f} elements per cell, over compressor.max_load="
            f"{self.config.max_load}; lower compressor.ratio or raise compressor.sparsity"
        )

    def adapt(self, step: int, densest: float, peers_union: float) -> str | None:
        if not self.config.dense_fallback or step < self.config.warmup_steps or self._dense_until == math.inf:
            return None
        if self.is_dense(step):  # decide whether to try the sketch at the next step
            if step + 1 < self._dense_until:
                return None
            load = self._estimate_load(min(densest / self.spec.numel, 1 - self.config.sparsity))
        else:
            load = peers_union / self.layout.sketch_numel
        if not load > self.config.max_load:
            return None
        held = "would hold" if self.is_dense(step) else "held"
        is_retry = self.is_dense(step) and step > self.config.warmup_steps
        self._dense_until = step + 1 + self.config.retry_steps
        if is_retry:
            return None  # it was said when the bucket went dense
        return (
            f"{self.spec.name}: its sketch {held} {load:.2f} elements per cell, over compressor.max_load="
            f"{self.config.max_load}; dense for {self.config.retry_steps} steps"
        )

    def _estimate_load(self, density: float) -> float:
        """Expected union of the peers per cell, if ranks choose independently (an upper bound in practice)."""
        union = 1 - (1 - density) ** (self.spec.ranks - 1)
        return union * self.spec.numel / self.layout.sketch_numel

    def _sketch_bytes(self) -> int:
        return (self.spec.ranks - 1) * (
            self.layout.sketch_numel * self.wire_dtype.itemsize + bitmap_bytes(self.spec.numel)
        )

    def _dense_bytes(self) -> int:
        return dense_bytes(self.spec.ranks, self.spec.numel, self.wire_dtype)

    def expected_bytes(self, step: int) -> dict[Kind, int]:
        if self.is_dense(step):
            return {"value": self._dense_bytes()}
        index = (self.spec.ranks - 1) * bitmap_bytes(self.spec.numel)
        return {"index": index, "value": self._sketch_bytes() - index}

    # --- encode -------------------------------------------------------------------------------------------------

    def encode(self, gradient_WN: Tensor, step: int) -> Sequence[Part]:
        x = gradient_WN.add_(self.residual_WN, alpha=self.config.residual_decay)
        self.stats = BucketStats()
        if self.is_dense(step):
            return self._encode_dense(x)
        mask = self.kernels.select_values(x, self._threshold(x, step))
        self._count_kept(mask)
        self._keep_rest(x, mask)
        rank = self.spec.rank
        self._own_N = torch.where(mask[rank], x[rank], 0.0)
        mask[rank] = False  # the owner's own values never travel
        index_WB = self.kernels.pack_bits(mask)
        self._sent_index_WB, self._sent_values = index_WB, x[mask]
        cells = x.new_zeros(self.spec.ranks, self.layout.sketch_numel, dtype=self.wire_dtype)
        selected = torch.where(mask, x, 0.0)
        for w in range(self.spec.ranks):
            if w != rank:
                cells[w] = self.kernels.sketch_values(selected[w], self.layout, self._table(step)).flatten()
        return [Part(index_WB, "or", "index"), Part(cells, "sum", "value")]

    def _encode_dense(self, x: Tensor) -> Sequence[Part]:
        wire = x.to(self.wire_dtype)
        self._count_kept(x != 0)
        torch.sub(x, wire, out=self.residual_WN)  # the rounding of a bf16 wire, else zero
        return [Part(wire, "sum", "value")]

    def _count_kept(self, mask_WN: Tensor) -> None:
        kept_W = mask_WN.sum(dim=1)
        self.stats.kept, self.stats.densest = kept_W.sum(), kept_W.max()

    def _keep_rest(self, x: Tensor, mask: Tensor) -> None:
        if self.config.error_feedback:
            self.residual_WN.copy_(x).masked_fill_(mask, 0.0)
        else:
            self.residual_WN.zero_()

    def _threshold(self, x: Tensor, step: int) -> Tensor:
        density = 1 - self.config.sparsity
        if density == 1:
            return x.new_zeros(1)
        if self.config.threshold == "exact":
            return self.kernels.threshold_exact(x, density)
        if self.config.threshold == "lognormal":
            return self.kernels.threshold_lognormal(x, density)
        generator = torch.Generator().manual_seed(self._seed + step)
        return self.kernels.threshold_sampled(x, density, self.config.threshold_sample, generator)

    def _table(self, step: int) -> HashTable:
        seed = self._seed * HASH_SEEDS + step % HASH_SEEDS
        return build_hash_table(self.layout.rows, self.layout.cells, seed, self.spec.device)

    # --- decode -------------------------------------------------------------------------------------------------

    def decode(self, received: Sequence[Tensor], step: int) -> Tensor:
        self._unresolved = None
        if self.is_dense(step):
            return received[0]
        index_B, cells = received
        union_N = self.kernels.unpack_bits(index_B, self.spec.numel)
        shape = (-1, self.layout.cells, self.layout.lanes)
        peeled = self.kernels.peel_sketch(cells.view(shape), union_N, self.layout, self._table(step))
        total_N = self._own_N
        self.stats.union = (union_N | (total_N != 0)).sum()
        if self.config.estimate_unresolved:
            total_N[peeled.position_E] += peeled.value_E
        else:
            total_N[peeled.position_E] += torch.where(peeled.resolved_E, peeled.value_E, 0.0)
            self._unresolved = peeled.position_E[~peeled.resolved_E]
        self.stats.peers_union = union_N.sum()
        self.stats.unresolved = (~peeled.resolved_E).sum()
        return total_N

    # --- returns ------------------------------------------------------------------------------------------------

    def unresolved_positions(self) -> Tensor | None:
        return self._unresolved

    def restore(self, owner: int, positions: Tensor) -> None:
        if self._sent_index_WB is None:
            return
        sent = self.kernels.unpack_bits(self._sent_index_WB, self.spec.numel).flatten()
        target = owner * self.spec.numel + positions
        target = target[sent[target]]
        slot = sent.cumsum(0)[target] - 1
        self.residual_WN.flatten()[target] += self._sent_values[slot]

    def residuals(self) -> dict[str, Tensor]:
        sizes = [numel for _, numel in self.spec.parameters]
        views = self.residual_WN.split(sizes, dim=1)
        return {name: view for (name, _), view in zip(self.spec.parameters, views, strict=True)}
