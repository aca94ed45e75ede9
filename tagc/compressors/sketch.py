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

from tagc.codec.bitmap import bitmap_bytes, pack_bits, unpack_bits
from tagc.codec.hashing import HashTable, SketchLayout, build_hash_table, plan_layout
from tagc.compressors.base import BucketSpec, BucketStats, Compressor, Kind, Part
from tagc.compressors.dense import dense_bytes
from tagc.compressors.threshold import choose_threshold
from tagc.config import CompressorConfig

HEADROOM = 0.95  # of max_load, so that the union may vary a little from step to step
HYSTERESIS = 1.2  # a sketch shrinks only if that saves a sixth: a new layout needs new tables
GRID = 8  # ratios are powers of 2^(1/8), so that few different tables are built
HASH_SEEDS = 8  # hash tables used in turn, so that no pair of rows collides at every step


class Sketch(Compressor):
    """One bucket's residual, hash tables and decision between sketch and dense."""

    state_tensors = ("carry_WN", "owed_WB")

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        super().__init__(config, spec, kernels)
        self.wire_dtype = getattr(torch, config.value_dtype)
        self.layout = plan_layout(spec.numel, config.ratio)
        if config.adaptive_ratio and config.sparsity > 0:
            self.layout = self._fit_layout(self._estimate_union(1 - config.sparsity))
        # The residual is carry where owed; see tagc/kernels/reference.py.
        carry_dtype = getattr(torch, config.residual_dtype)
        self.carry_WN = torch.zeros(spec.ranks, spec.numel, device=spec.device, dtype=carry_dtype)
        self.owed_WB = torch.zeros(spec.ranks, bitmap_bytes(spec.numel), dtype=torch.uint8, device=spec.device)
        self._dense_until: float = config.warmup_steps
        self._unresolved_B: Tensor | None = None
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
            remedy = "sparsity" if self.config.adaptive_ratio else "ratio"
            return (
                f"{self.spec.name}: dense, its sketch would be larger ({self._sketch_bytes()} against "
                f"{self._dense_bytes()} bytes); raise compressor.{remedy}"
            )
        return (
            f"{self.spec.name}: dense, sparsity {self.config.sparsity} at {self.spec.ranks} ranks loads the sketch to "
            f"{self._estimate_load(1 - self.config.sparsity):.2f} elements per cell, over compressor.max_load="
            f"{self.config.max_load}; lower compressor.ratio or raise compressor.sparsity"
        )

    def adapt(self, step: int, densest: float, peers_union: float) -> str | None:
        was_dense = self.is_dense(step)
        if was_dense:  # decide whether to try the sketch at the next step
            if step + 1 < self._dense_until or self._dense_until == math.inf:
                return None
            peers_union = self._estimate_union(min(densest / self.spec.numel, 1 - self.config.sparsity))
        if self.config.adaptive_ratio:
            self._follow_union(peers_union)
        load = peers_union / self.layout.sketch_numel
        fits = load <= self.config.max_load and self._sketch_bytes() <= self._dense_bytes()
        if fits or not self.config.dense_fallback:
            return None
        self._dense_until = step + 1 + self.config.retry_steps
        if was_dense and step >= max(1, self.config.warmup_steps):
            return None  # it was said when the bucket went dense
        return (
            f"{self.spec.name}: {peers_union / self.spec.numel:.1%} of a shard to sketch is {load:.2f} elements per "
            f"cell (compressor.max_load={self.config.max_load}) in {self._sketch_bytes()} bytes ({self._dense_bytes()} "
            f"dense); dense for {self.config.retry_steps} steps"
        )

    def _estimate_load(self, density: float) -> float:
        return self._estimate_union(density) / self.layout.sketch_numel

    def _estimate_union(self, density: float) -> float:
        """Expected union of the peers in one shard, if ranks choose independently (an upper bound in practice)."""
        return (1 - (1 - density) ** (self.spec.ranks - 1)) * self.spec.numel

    def _follow_union(self, peers_union: float) -> None:
        """Shrink or grow the sketch to what the union needs. An overload returns values; room to spare costs bytes."""
        fitting = self._fit_layout(peers_union)
        overloaded = peers_union > self.config.max_load * self.layout.sketch_numel
        if overloaded or fitting.sketch_numel * HYSTERESIS < self.layout.sketch_numel:
            self.layout = fitting

    def _fit_layout(self, peers_union: float) -> SketchLayout:
        """The smallest sketch of the grid of ratios that holds the union a little below ``max_load``."""
        ratio = HEADROOM * self.config.max_load * self.spec.numel / max(1.0, peers_union)
        return plan_layout(self.spec.numel, 2 ** (math.floor(GRID * math.log2(min(ratio, 64.0))) / GRID))

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
        self.stats = BucketStats()
        if self.is_dense(step):
            return self._encode_dense(gradient_WN)
        threshold_W1, decay = choose_threshold(self, gradient_WN, step)
        encoded = self.kernels.encode_sketch(
            gradient_WN,
            self.carry_WN,
            self.owed_WB,
            threshold_W1,
            decay=decay,
            rank=self.spec.rank,
            layout=self.layout,
            table=self._table(step),
            wire_dtype=self.wire_dtype,
            error_feedback=self.config.error_feedback,
        )
        self._own_N, self._sent_index_WB = encoded.own_N, encoded.index_WB
        self.stats.kept, self.stats.densest = encoded.kept_W.sum(), encoded.kept_W.max()
        self.stats.residual_squared, self.stats.threshold = encoded.residual_squared, threshold_W1.mean()
        return [Part(encoded.index_WB, "or", "index"), Part(encoded.cells_WS, "sum", "value")]

    def add_residual(self, gradient_WN: Tensor) -> Tensor:
        """``gradient + residual_decay * residual``, in the gradient's memory."""
        return self.kernels.add_residual(gradient_WN, self.carry_WN, self.owed_WB, self.config.residual_decay)

    def sample_values(self, gradient_WN: Tensor, position_K: Tensor) -> Tensor:
        """The same at the positions given, in every shard: float32 [W, K]."""
        decay = self.config.residual_decay
        return self.kernels.sample_values(gradient_WN, self.carry_WN, self.owed_WB, position_K, decay)

    def _encode_dense(self, gradient_WN: Tensor) -> Sequence[Part]:
        x = self.add_residual(gradient_WN)
        wire = x.to(self.wire_dtype)
        kept_W = (x != 0).sum(dim=1)
        self.stats.kept, self.stats.densest = kept_W.sum(), kept_W.max()
        if self.config.error_feedback:
            torch.sub(x, wire, out=self.carry_WN)  # the rounding of a bf16 wire, else zero
        else:
            self.carry_WN.zero_()
        self.owed_WB.fill_(255)
        self.stats.residual_squared = self.carry_WN.float().square().sum()
        return [Part(wire, "sum", "value")]

    def _table(self, step: int) -> HashTable:
        seed = self.spec.seed * HASH_SEEDS + step % HASH_SEEDS  # of no bucket's own: equal shapes share their tables
        return build_hash_table(self.layout.rows, self.layout.cells, seed, self.spec.device)

    # --- decode -------------------------------------------------------------------------------------------------

    def decode(self, received: Sequence[Tensor], step: int) -> Tensor:
        self._unresolved_B = None
        if self.is_dense(step):
            return received[0]
        decoded = self.kernels.decode_sketch(
            *received,
            self._own_N,
            layout=self.layout,
            table=self._table(step),
            estimate=self.config.estimate_unresolved,
        )
        self.stats.union, self.stats.peers_union = decoded.union, decoded.peers_union
        self.stats.unresolved = decoded.unresolved
        if not self.config.estimate_unresolved:
            self._unresolved_B = decoded.unresolved_B
        return decoded.total_N

    # --- state --------------------------------------------------------------------------------------------------

    def unresolved_positions(self) -> Tensor | None:
        if self._unresolved_B is None:
            return None
        return unpack_bits(self._unresolved_B, self.spec.numel).nonzero().squeeze(1)

    def restore(self, owner: int, positions: Tensor) -> None:
        sent = unpack_bits(self._sent_index_WB[owner], self.spec.numel)
        owed = unpack_bits(self.owed_WB[owner], self.spec.numel)
        owed[positions] |= sent[positions]
        self.owed_WB[owner] = pack_bits(owed)

    def residuals(self) -> dict[str, Tensor]:
        residual_WN = torch.where(unpack_bits(self.owed_WB, self.spec.numel), self.carry_WN, 0.0)
        return self.spec.split_parameters(residual_WN.float())

    def load_residuals(self, residuals: dict[str, Tensor]) -> None:
        self.carry_WN.copy_(torch.cat([residuals[name] for name, _ in self.spec.parameters], dim=1))
        self.owed_WB.fill_(255)

    def state_dict(self) -> dict[str, Tensor]:
        until = torch.tensor(self._dense_until, dtype=torch.float64)  # may be infinite
        numbers = {"layout": torch.tensor(astuple(self.layout)), "dense_until": until}
        return {**super().state_dict(), **numbers}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.layout = SketchLayout(*state["layout"].tolist())
        self._dense_until = state["dense_until"].item()

    @property
    def ratio(self) -> float:
        return self.spec.numel / self.layout.sketch_numel

    @property
    def residual_bytes(self) -> int:
        return self.carry_WN.nbytes + self.owed_WB.nbytes
