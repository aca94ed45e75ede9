"""``packed``: every rank sends its own index and the values it selects, all-to-all; nothing is hashed.

In a direct exchange, where nothing adds in transit, this needs no room for the union of the ranks: the message does not
grow with their number. It is the baseline that a sketch has to beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.codec.packed import plan_capacity
from tagc.compressors.base import BucketSpec, Compressor, Kind, Part, Payload
from tagc.compressors.residual import Residual
from tagc.compressors.threshold import draw_sample, estimate_threshold
from tagc.config import CompressorConfig

RAISE = 1.1  # the factor on the threshold of a shard after a step that filled its room


class Packed(Compressor):
    """A fixed room per shard; what does not fit waits in the residual, as does the rounding of what is sent.

    The room is given out by position, so a threshold that stays too low would starve a shard's tail for ever, while its
    residual grows. Therefore the threshold rises as long as the room is full, and comes down again afterwards.
    """

    residual_type = Residual
    residual: Residual
    state_tensors = ("_raise_W1",)

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        self.capacity = plan_capacity(spec.numel, 1 - config.sparsity, config.capacity_slack)
        super().__init__(config, spec, kernels)
        self._raise_W1 = torch.ones(spec.ranks, 1, device=spec.device)
        if self.is_too_large():
            self.dense_until = math.inf

    def message_bytes(self) -> dict[Kind, int]:
        peers = self.spec.ranks - 1
        return {
            "index": peers * bitmap_bytes(self.spec.numel),
            "value": peers * self.capacity * self.wire_dtype.itemsize,
        }

    def encode_message(self, gradient_WN: Tensor, step: int) -> Payload:
        config = self.config
        sample_WK = self.residual.sample(gradient_WN, draw_sample(config, self.spec, step), config.residual_decay)
        threshold_W1 = estimate_threshold(sample_WK, config, self.kernels) * self._raise_W1
        encoded = self.kernels.encode_packed(
            gradient_WN,
            self.residual.values_WN,
            threshold_W1,
            decay=config.residual_decay,
            rank=self.spec.rank,
            capacity=self.capacity,
            wire_dtype=self.wire_dtype,
            error_feedback=config.error_feedback,
        )
        if self.capacity < self.spec.numel:
            self._adjust_raise(encoded.kept_W)
        parts = [Part(encoded.index_WB, "stack", "index"), Part(encoded.values_WC, "stack", "value")]
        payload = Payload(parts, step, own_N=encoded.own_N)
        stats = payload.stats
        stats.kept, stats.densest = encoded.kept_W.sum(), encoded.kept_W.max()
        stats.residual_squared, stats.threshold = encoded.residual_squared, threshold_W1.mean()
        return payload

    def _adjust_raise(self, kept_W: Tensor) -> None:
        full_W1 = (kept_W >= self.capacity).unsqueeze(1)
        full_W1[self.spec.rank] = False  # the own shard's values need no room
        self._raise_W1 = torch.where(full_W1, self._raise_W1 * RAISE, (self._raise_W1 / RAISE).clamp(min=1.0))

    def decode_message(self, received: Sequence[Tensor], payload: Payload) -> Tensor:
        stats = payload.stats
        total_N, stats.union = self.kernels.decode_packed(*received, payload.own_N)
        # No value has to be separated from another one.
        stats.peers_union = stats.unresolved = torch.zeros_like(stats.union)
        return total_N

    def explain_dense(self) -> str | None:
        return self.explain_size("raise compressor.sparsity or lower compressor.capacity_slack")
