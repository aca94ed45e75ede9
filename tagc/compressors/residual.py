"""What ``packed``, ``int8`` and ``int4`` share: one residual per element, and steps that travel dense."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tagc.compressors.base import BucketSpec, BucketStats, Compressor, Kind, Part
from tagc.compressors.dense import dense_bytes
from tagc.config import CompressorConfig


class ResidualCompressor(Compressor):
    """A compressor whose messages have a fixed size and never add up in transit.

    A subclass gives the message: its bytes, encode and decode. Here are the residual, the dense warm-up, and the
    decision, once and for all, to send a bucket dense because that is smaller.
    """

    state_tensors: tuple[str, ...] = ("residual_WN",)

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        super().__init__(config, spec, kernels)
        self.wire_dtype = getattr(torch, config.value_dtype)
        residual_dtype = getattr(torch, config.residual_dtype)
        self.residual_WN = torch.zeros(spec.ranks, spec.numel, device=spec.device, dtype=residual_dtype)

    @abstractmethod
    def message_bytes(self) -> dict[Kind, int]:
        """Closed form of the bytes sent to all peers in a step that is not dense, by kind."""

    @abstractmethod
    def encode_message(self, gradient_WN: Tensor, step: int) -> Sequence[Part]:
        """Encode a step that is not dense. gradient_WN: as for ``encode``."""

    @abstractmethod
    def decode_message(self, received: Sequence[Tensor]) -> Tensor:
        """Decode a step that is not dense: received parts -> fp32 [N], the sum."""

    # --- decision between message and dense ---------------------------------------------------------------------

    def is_dense(self, step: int) -> bool:
        """Whether ``step`` travels dense; the same on every rank."""
        return step < self.config.warmup_steps or self._is_always_dense()

    def _is_always_dense(self) -> bool:
        return self.config.dense_fallback and sum(self.message_bytes().values()) > self._dense_bytes()

    def _dense_bytes(self) -> int:
        return dense_bytes(self.spec.ranks, self.spec.numel, self.wire_dtype)

    def explain_dense(self) -> str | None:
        if not self._is_always_dense():
            return None
        return (
            f"{self.spec.name}: dense, its {self.config.name} message would be larger "
            f"({sum(self.message_bytes().values())} against {self._dense_bytes()} bytes)"
        )

    def expected_bytes(self, step: int) -> dict[Kind, int]:
        return {"value": self._dense_bytes()} if self.is_dense(step) else self.message_bytes()

    # --- encode and decode --------------------------------------------------------------------------------------

    def encode(self, gradient_WN: Tensor, step: int) -> Sequence[Part]:
        self.stats = BucketStats()
        return self._encode_dense(gradient_WN) if self.is_dense(step) else self.encode_message(gradient_WN, step)

    def decode(self, received: Sequence[Tensor], step: int) -> Tensor:
        return received[0] if self.is_dense(step) else self.decode_message(received)

    def add_residual(self, gradient_WN: Tensor) -> Tensor:
        """``gradient + residual_decay * residual``, in the gradient's memory."""
        if self.config.residual_decay == 0:
            return gradient_WN
        return gradient_WN.add_(self.residual_WN.float(), alpha=self.config.residual_decay)

    def _encode_dense(self, gradient_WN: Tensor) -> Sequence[Part]:
        x = self.add_residual(gradient_WN)
        wire = x.to(self.wire_dtype)
        if self.config.error_feedback:
            self.residual_WN.copy_(x - wire.float())  # the rounding of a bf16 wire, else zero
        else:
            self.residual_WN.zero_()
        self.stats.residual_squared = self.residual_WN.float().square().sum()
        return [Part(wire, "sum", "value")]

    # --- state --------------------------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        # to(copy=True): a view would change under the caller at the next step
        return self.spec.split_parameters(self.residual_WN.to(torch.float32, copy=True))

    def load_residuals(self, residuals: dict[str, Tensor]) -> None:
        self.residual_WN.copy_(torch.cat([residuals[name] for name, _ in self.spec.parameters], dim=1))

    @property
    def residual_bytes(self) -> int:
        return self.residual_WN.nbytes
