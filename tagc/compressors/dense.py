"""Dense methods: ``fsdp`` (fp32 on the wire), ``bf16`` (bf16 on the wire, added in fp32), ``noop`` (nothing sent)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tagc.compressors.base import Compressor, Kind, Part


def dense_bytes(ranks: int, numel: int, dtype: torch.dtype) -> int:
    """Bytes one rank sends when every peer gets its shard of ``numel`` elements whole."""
    return (ranks - 1) * numel * dtype.itemsize


class Dense(Compressor):
    """Every rank sends its gradient to the shard's owner as it is."""

    follows_layer_policy = False
    wire_dtype = torch.float32

    def encode(self, gradient_WN: Tensor, step: int) -> Sequence[Part]:
        return [Part(gradient_WN.to(self.wire_dtype), "sum", "value")]

    def decode(self, received: Sequence[Tensor], step: int) -> Tensor:
        return received[0]

    def expected_bytes(self, step: int) -> dict[Kind, int]:
        return {"value": dense_bytes(self.spec.ranks, self.spec.numel, self.wire_dtype)}


class DenseBf16(Dense):
    """Gradients rounded to bfloat16 on the wire, the owner's own gradient too, so that all ranks count alike."""

    wire_dtype = torch.bfloat16


class Noop(Compressor):
    """The ceiling of any compressor: no gradient traffic. Every owner applies its own gradient alone."""

    follows_layer_policy = False

    def encode(self, gradient_WN: Tensor, step: int) -> Sequence[Part]:
        # Scaled to a sum over ranks, since the caller divides by their number.
        self._own_N = gradient_WN[self.spec.rank] * self.spec.ranks
        return []

    def decode(self, received: Sequence[Tensor], step: int) -> Tensor:
        return self._own_N

    def expected_bytes(self, step: int) -> dict[Kind, int]:
        return {}
