"""``lhc``, ``tagc`` and ``tagc2``: select, sketch, send an index and cells, peel at the owner.

The three differ in configuration only: ``lhc`` sends every non-zero (sparsity 0, all layers), ``tagc`` the largest
values with error feedback in fp32 cells, ``tagc2`` the same in bf16 cells with a sketch whose size follows the measured
union (``adaptive_ratio``). Sources: arXiv 2402.07529 (LHC), arXiv 2504.05638 (TAGC), FAIA 260015 (TAGC-2).

The owner keeps its own selected values apart: they never enter a sketch, so its peeling problem holds the union of its
*peers'* indices only (density d instead of 1-(1-d)^2 at two ranks) and its own values are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from types import ModuleType

import torch
from torch import Tensor

from tagc.codec.hashing import HashTable, build_hash_table
from tagc.codec.sizes import SketchLayout, bitmap_bytes, expected_union, fit_layout, plan_layout
from tagc.compressors.base import BucketSpec, BucketStats, Compressor, Kind, Part, Payload
from tagc.compressors.residual import OwedResidual
from tagc.compressors.threshold import draw_sample, estimate_threshold
from tagc.config import CompressorConfig

HYSTERESIS = 1.2  # a sketch shrinks only if that saves a sixth: a new layout needs new tables
HASH_SEEDS = 8  # hash tables used in turn, so that no pair of rows collides at every step


class Tagc(Compressor):
    """One bucket's sketch of ``lhc``, ``tagc`` or ``tagc2``, its size, and the decision between sketch and dense."""

    residual_type = OwedResidual
    residual: OwedResidual

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        super().__init__(config, spec, kernels)
        self.layout = plan_layout(spec.numel, config.ratio)
        if config.adaptive_ratio and config.sparsity > 0:
            self.layout = self._fit_layout(self._estimate_union(1 - config.sparsity))
        if config.dense_fallback:
            if self.is_too_large():
                self.dense_until = math.inf
            elif config.sparsity == 0:
                self.dense_until = max(self.dense_until, 1)  # the density is unknown until one step has shown it
            elif self._estimate_load(1 - config.sparsity) > config.max_load:
                self.dense_until = math.inf

    # --- decision between sketch and dense ---------------------------------------------------------------------

    def explain_dense(self) -> str | None:
        if self.dense_until != math.inf:
            return None
        remedy = "raise compressor.sparsity" if self.config.adaptive_ratio else "raise compressor.ratio"
        return self.explain_size(remedy) or (
            f"{self.spec.name}: dense, sparsity {self.config.sparsity} at {self.spec.ranks} ranks loads the sketch to "
            f"{self._estimate_load(1 - self.config.sparsity):.2f} elements per cell, over compressor.max_load="
            f"{self.config.max_load}; lower compressor.ratio or raise compressor.sparsity"
        )

    def adapt(self, payload: Payload, densest: float, peers_union: float) -> str | None:
        step, was_dense = payload.step, payload.went_dense
        if was_dense:  # decide whether to try the sketch at the next step
            if step + 1 < self.dense_until or self.dense_until == math.inf:
                return None
            peers_union = self._estimate_union(min(densest / self.spec.numel, 1 - self.config.sparsity))
        if self.config.adaptive_ratio:
            self._follow_union(peers_union)
        if not self.config.dense_fallback or (reason := self._explain_misfit(peers_union)) is None:
            return None
        self.dense_until = step + 1 + self.config.retry_steps
        if was_dense and step >= max(1, self.config.warmup_steps):
            return None  # it was said when the bucket went dense
        return f"{self.spec.name}: {reason}; dense for {self.config.retry_steps} steps"

    def _explain_misfit(self, peers_union: float) -> str | None:
        """Why a sketch of the present size does not serve a union of so many elements, and what to set; or None."""
        config, share = self.config, f"{peers_union / self.spec.numel:.1%} of a shard to sketch"
        load, sketch_bytes = peers_union / self.layout.sketch_numel, sum(self.message_bytes().values())
        if load > config.max_load:
            return (
                f"{share} is {load:.2f} elements per cell, over compressor.max_load={config.max_load}; lower "
                "compressor.ratio or raise compressor.sparsity"
            )
        if sketch_bytes > self.dense_bytes:
            return (
                f"{share} needs a message of {sketch_bytes} bytes, a dense one has {self.dense_bytes}; raise "
                f"compressor.sparsity={config.sparsity:g}"
            )
        return None

    def _estimate_load(self, density: float) -> float:
        return self._estimate_union(density) / self.layout.sketch_numel

    def _estimate_union(self, density: float) -> float:
        """Expected union of the peers in one shard, if ranks choose independently (an upper bound in practice)."""
        return expected_union(self.spec.numel, density, self.spec.ranks)

    def _follow_union(self, peers_union: float) -> None:
        """Shrink or grow the sketch to what the union needs. An overload returns values; room to spare costs bytes."""
        fitting = self._fit_layout(peers_union)
        overloaded = peers_union > self.config.max_load * self.layout.sketch_numel
        if overloaded or fitting.sketch_numel * HYSTERESIS < self.layout.sketch_numel:
            self.layout = fitting

    def _fit_layout(self, peers_union: float) -> SketchLayout:
        """The smallest sketch of the grid of ratios that holds the union a little below ``max_load``."""
        return fit_layout(self.spec.numel, peers_union, self.config.max_load)

    def message_bytes(self) -> dict[Kind, int]:
        peers = self.spec.ranks - 1
        return {
            "index": peers * bitmap_bytes(self.spec.numel),
            "value": peers * self.layout.sketch_numel * self.wire_dtype.itemsize,
        }

    # --- encode and decode --------------------------------------------------------------------------------------

    def encode_message(self, gradient_WN: Tensor, step: int) -> Payload:
        config = self.config
        sample_WK = self.residual.sample(gradient_WN, draw_sample(config, self.spec, step), config.residual_decay)
        threshold_W1 = estimate_threshold(sample_WK, config, self.kernels)
        encoded = self.kernels.encode_sketch(
            gradient_WN,
            self.residual.values_WN,
            self.residual.owed_WB,
            threshold_W1,
            decay=config.residual_decay,
            rank=self.spec.rank,
            layout=self.layout,
            table=self._table(step),
            wire_dtype=self.wire_dtype,
            error_feedback=config.error_feedback,
        )
        parts = [Part(encoded.index_WB, "or", "index"), Part(encoded.cells_WS, "sum", "value")]
        payload = Payload(parts, step, own_N=encoded.own_N, sent_index_WB=encoded.index_WB)
        stats = payload.stats
        stats.kept, stats.densest = encoded.kept_W.sum(), encoded.kept_W.max()
        stats.residual_squared, stats.threshold = encoded.residual_squared, threshold_W1.mean()
        return payload

    def measure_dense(self, x_WN: Tensor, stats: BucketStats) -> None:
        kept_W = (x_WN != 0).sum(dim=1)
        stats.kept, stats.densest = kept_W.sum(), kept_W.max()

    def decode_message(self, received: Sequence[Tensor], payload: Payload) -> Tensor:
        decoded = self.kernels.decode_sketch(
            *received,
            payload.own_N,
            layout=self.layout,
            table=self._table(payload.step),
            estimate=self.config.estimate_unresolved,
        )
        stats = payload.stats
        stats.union, stats.peers_union, stats.unresolved = decoded.union, decoded.peers_union, decoded.unresolved
        if not self.config.estimate_unresolved:
            payload.unresolved_B = decoded.unresolved_B
        return decoded.total_N

    def _table(self, step: int) -> HashTable:
        seed = self.spec.seed * HASH_SEEDS + step % HASH_SEEDS  # of no bucket: equal shapes share their tables
        return build_hash_table(self.layout.rows, self.layout.cells, seed, self.spec.device)

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        until = torch.tensor(self.dense_until, dtype=torch.float64)  # may be infinite
        numbers = {"layout": torch.tensor(astuple(self.layout)), "dense_until": until}
        return {**super().state_dict(), **numbers}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.layout = SketchLayout(*state["layout"].tolist())
        self.dense_until = state["dense_until"].item()

    @property
    def ratio(self) -> float:
        return self.spec.numel / self.layout.sketch_numel
