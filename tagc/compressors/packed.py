"""``packed``: every rank sends its own index and the values it selects, all-to-all; nothing is hashed.

In a direct exchange, where nothing adds in transit, this needs no room for the union of the ranks: the message does not
grow with their number. It is the baseline that a sketch has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes
from tagc.codec.packed import plan_capacity
from tagc.compressors.base import BucketSpec, Kind, Part
from tagc.compressors.residual import ResidualCompressor
from tagc.compressors.threshold import choose_threshold
from tagc.config import CompressorConfig

RAISE = 1.1  # the factor on the threshold of a shard after a step that filled its room


class Packed(ResidualCompressor):
    """A fixed room per shard; what does not fit waits in the residual, as does the rounding of what is sent.

    The room is given out by position, so a threshold that stays too low would starve a shard's tail for ever, while its
    residual grows. Therefore the threshold rises as long as the room is full, and comes down again afterwards.
    """

    state_tensors = ("residual_WN", "_raise_W1")

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        self.capacity = plan_capacity(spec.numel, 1 - config.sparsity, config.capacity_slack)
        super().__init__(config, spec, kernels)
        self._raise_W1 = torch.ones(spec.ranks, 1, device=spec.device)

    def message_bytes(self) -> dict[Kind, int]:
        peers = self.spec.ranks - 1
        return {
            "index": peers * bitmap_bytes(self.spec.numel),
            "value": peers * self.capacity * self.wire_dtype.itemsize,
        }

    def encode_message(self, gradient_WN: Tensor, step: int) -> Sequence[Part]:
        threshold_W1, decay = choose_threshold(self, gradient_WN, step)
        threshold_W1 = threshold_W1 * self._raise_W1
        encoded = self.kernels.encode_packed(
            gradient_WN,
            self.residual_WN,
            threshold_W1,
            decay=decay,
            rank=self.spec.rank,
            capacity=self.capacity,
            wire_dtype=self.wire_dtype,
            error_feedback=self.config.error_feedback,
        )
        self._own_N = encoded.own_N
        if self.capacity < self.spec.numel:
            self._adjust_raise(encoded.kept_W)
        self.stats.kept, self.stats.densest = encoded.kept_W.sum(), encoded.kept_W.max()
        self.stats.residual_squared, self.stats.threshold = encoded.residual_squared, threshold_W1.mean()
        return [Part(encoded.index_WB, "stack", "index"), Part(encoded.values_WC, "stack", "value")]

    def sample_values(self, gradient_WN: Tensor, position_K: Tensor) -> Tensor:
        """What :meth:`add_residual` gives at the positions, in every shard: float32 [W, K]."""
        return self.kernels.sample_values(gradient_WN, self.residual_WN, None, position_K, self.config.residual_decay)

    def _adjust_raise(self, kept_W: Tensor) -> None:
        full_W1 = (kept_W >= self.capacity).unsqueeze(1)
        full_W1[self.spec.rank] = False  # the own shard's values need no room
        self._raise_W1 = torch.where(full_W1, self._raise_W1 * RAISE, (self._raise_W1 / RAISE).clamp(min=1.0))

    def decode_message(self, received: Sequence[Tensor]) -> Tensor:
        total_N, self.stats.union = self.kernels.decode_packed(*received, self._own_N)
        # No value has to be separated from another one.
        self.stats.peers_union = self.stats.unresolved = torch.zeros_like(self.stats.union)
        return total_N

    def explain_dense(self) -> str | None:
        reason = super().explain_dense()
        return reason and f"{reason}; raise compressor.sparsity or lower compressor.capacity_slack"
