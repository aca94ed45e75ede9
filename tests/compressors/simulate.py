"""All ranks of one bucket in one process: encode on all, move and reduce as the exchange does, decode on all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagc.codec.bitmap import or_bitmaps
from tagc.compressors import COMPRESSORS, BucketSpec, Compressor, Payload
from tagc.config import CompressorConfig
from tagc.kernels import resolve_backend


def make_compressors(name: str, ranks: int, numel: int, **config: Any) -> list[Compressor]:
    """One compressor per rank for a bucket of two parameters and ``numel`` elements per shard."""
    settings = CompressorConfig(
        name=name,
        **{"value_dtype": "float32", "dense_fallback": False, "adaptive_ratio": False, "max_load": 0.75, **config},
    )
    kernels = resolve_backend("reference")[1]
    parts = (("first", numel - numel // 3), ("second", numel // 3))
    return [
        COMPRESSORS[name](settings, BucketSpec("unit", parts, ranks, rank, torch.device("cpu"), seed=5), kernels)
        for rank in range(ranks)
    ]


def integer_gradients(ranks: int, numel: int, seed: int = 0, density: float = 1.0) -> Tensor:
    """[senders, owners, N] of integers up to a few hundred, which fp32 adds without rounding."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(ranks, ranks, numel, generator=generator) * 100).round()
    return torch.where(torch.rand(values.shape, generator=generator) < density, values, 0.0)


def run_step(compressors: list[Compressor], gradients: Tensor, step: int) -> tuple[Tensor, int]:
    """One step on all ranks. Returns the owners' sums [W, N] and the bytes rank 0 sent."""
    ranks = len(compressors)
    payloads = [c.encode(gradients[rank].clone(), step) for rank, c in enumerate(compressors)]
    sent = [payload.parts for payload in payloads]
    sent_bytes = sum(part.tensor.nbytes // ranks * (ranks - 1) for part in sent[0])
    reduce_rows = {"or": or_bitmaps, "sum": lambda rows: rows.float().sum(dim=0), "stack": lambda rows: rows}
    sums = []
    for owner, compressor in enumerate(compressors):
        received = []
        for parts in zip(*sent, strict=True):
            rows = torch.stack([part.tensor[owner] for part in parts])
            received.append(reduce_rows[parts[0].reduce](rows))
        sums.append(compressor.decode(received, payloads[owner]))
    for owner, compressor in enumerate(compressors):
        positions = compressor.unresolved_positions(payloads[owner])
        if positions is not None and positions.numel():
            for other, payload in zip(compressors, payloads, strict=True):
                other.restore(payload, owner, positions)
    for compressor, payload in zip(compressors, payloads, strict=True):
        compressor.payload = payload  # type: ignore[attr-defined]  # of the last step, for tests to look at
    return torch.stack(sums), sent_bytes


def adapt(compressor: Compressor, step: int, **measured: float) -> str | None:
    """What the compressor concludes from a step whose exchange is left out."""
    return compressor.adapt(Payload([], step, went_dense=compressor.is_dense(step)), **measured)


def total_residual(compressors: list[Compressor]) -> Tensor:
    """[W owners, N]: what all ranks together still owe each shard."""
    return torch.stack([torch.cat(list(c.residuals().values()), dim=1) for c in compressors]).sum(dim=0)
