"""``int8`` and ``int4``: every element as a small integer with a scale per block, all-to-all, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tagc.codec.quantize import block_count, code_bytes
from tagc.compressors.base import BucketSpec, Compressor, Kind, Part, Payload
from tagc.compressors.residual import Residual
from tagc.config import CompressorConfig


class Int8(Compressor):
    """Integers from -127 to 127. What they miss stays in the residual; without error feedback it is dropped."""

    residual_type = Residual
    residual: Residual
    bits = 8

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        self._sizes = (code_bytes(spec.numel, self.bits), block_count(spec.numel, config.block))
        super().__init__(config, spec, kernels)
        if self.is_too_large():
            self.dense_until = math.inf

    def message_bytes(self) -> dict[Kind, int]:
        codes, blocks = self._sizes
        return {"value": (self.spec.ranks - 1) * (codes + blocks * torch.float32.itemsize)}

    def encode_message(self, gradient_WN: Tensor, step: int) -> Payload:
        feedback, kept_WN = self.config.error_feedback, self.residual.values_WN
        encoded = self.kernels.encode_blocks(
            gradient_WN,
            kept_WN,
            decay=self.config.residual_decay if feedback else 0.0,
            rank=self.spec.rank,
            bits=self.bits,
            block=self.config.block,
        )
        if not feedback:
            kept_WN.zero_()
        parts = [Part(encoded.codes_WM, "stack", "value"), Part(encoded.scales_WK, "stack", "value")]
        payload = Payload(parts, step, own_N=encoded.own_N)
        payload.stats.residual_squared = encoded.residual_squared if feedback else kept_WN.new_zeros(())
        return payload

    def decode_message(self, received: Sequence[Tensor], payload: Payload) -> Tensor:
        return self.kernels.decode_blocks(*received, payload.own_N, bits=self.bits, block=self.config.block)

    def explain_dense(self) -> str | None:
        return self.explain_size("raise compressor.block")


class Int4(Int8):
    """Integers from -7 to 7."""

    bits = 4
