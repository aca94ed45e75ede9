"""Dense methods: ``fsdp`` (fp32 on the wire), ``bf16`` (bf16 on the wire, added in fp32), ``noop`` (nothing sent)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tagc.compressors.base import BucketSpec, Compressor, Kind, Payload
from tagc.config import CompressorConfig


class Dense(Compressor):
    """Every rank sends its gradient to the shard's owner as it is, at every step."""

    follows_layer_policy = False
    compresses = False
    fixed_dtype = torch.float32

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        super().__init__(config, spec, kernels)
        self.wire_dtype = self.fixed_dtype

    def message_bytes(self) -> dict[Kind, int]:
        return {"value": self.dense_bytes}

    def encode_message(self, gradient_WN: Tensor, step: int) -> Payload:
        return self._encode_dense(gradient_WN, step)

    def decode_message(self, received: Sequence[Tensor], payload: Payload) -> Tensor:
        return received[0]


class DenseBf16(Dense):
    """Gradients rounded to bfloat16 on the wire, the owner's own gradient too, so that all ranks count alike."""

    compresses = True
    fixed_dtype = torch.bfloat16


class Noop(Compressor):
    """The ceiling of any compressor: no gradient traffic. Every owner applies its own gradient alone."""

    follows_layer_policy = False

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        super().__init__(config, spec, kernels)
        self.dense_until = 0

    def message_bytes(self) -> dict[Kind, int]:
        return {}

    def encode_message(self, gradient_WN: Tensor, step: int) -> Payload:
        # Scaled to a sum over ranks, since the caller divides by their number.
        return Payload([], step, own_N=gradient_WN[self.spec.rank] * self.spec.ranks)

    def decode_message(self, received: Sequence[Tensor], payload: Payload) -> Tensor:
        assert payload.own_N is not None
        return payload.own_N
