"""An FSDP unit's gradients as a bucket, and the layer policy that splits its columns among compressors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from tagc.comm.policy import RoleSummary, is_compressed, role_of
from tagc.compressors import BucketSpec, Compressor, Dense, Payload
from tagc.config import CompressorConfig

Columns = tuple[str, slice]  # a parameter's name and its columns in the bucket


@dataclass
class Slot:
    """The columns of a bucket that one compressor handles."""

    compressor: Compressor
    columns: list[slice]
    payload: Payload | None = None  # of the step that is not finished, if the bucket was reduced in it
    sent_bytes: int = 0  # to all peers at its last reduction, without returns

    @property
    def numel(self) -> int:
        """Elements of one shard."""
        return self.compressor.spec.numel

    @property
    def went_dense(self) -> bool:
        """Whether this step's reduction sent gradients whole, or there was none."""
        return self.payload is None or self.payload.went_dense

    def undo(self) -> None:
        """Take back what the unfinished step changed in the compressor."""
        if self.payload is not None:
            self.compressor.undo(self.payload)
        self.payload = None

    def take(self, gradient_WS: Tensor) -> Tensor:
        """The slot's columns, contiguous [W, N]; the bucket itself where the slot is all of it."""
        if self.numel == gradient_WS.shape[1]:
            return gradient_WS
        return torch.cat([gradient_WS[:, part] for part in self.columns], dim=1)

    def put(self, total_S: Tensor, total_N: Tensor) -> None:
        """Write the decoded shard back to the slot's columns."""
        sizes = [part.stop - part.start for part in self.columns]
        for part, piece in zip(self.columns, total_N.split(sizes), strict=True):
            total_S[part] = piece


@dataclass
class Bucket:
    """One FSDP unit's gradients."""

    name: str
    parameters: list[Columns]  # in FSDP's order
    slots: list[Slot]
    is_reduced: bool = False  # in this step
    column_sums: Tensor | None = None  # per parameter, to find NaN and Inf; set by the step's reduction


def build_bucket(
    config: CompressorConfig,
    method: type[Compressor],
    seed: int,
    unit: str,
    parameters: Sequence[tuple[str, torch.Size]],
    ranks: int,
    rank: int,
    device: torch.device,
    kernels: ModuleType,
) -> Bucket:
    """Lay out one unit's columns and give each slot its compressor.

    parameters: (name, full shape) in FSDP's order. FSDP pads the first dimension to a multiple of ``ranks``.
    """
    columns: list[Columns] = []
    chosen: list[Columns] = []
    offset = 0
    for name, shape in parameters:
        numel = math.ceil(shape[0] / ranks) * math.prod(shape[1:])
        columns.append((name, slice(offset, offset + numel)))
        if not method.follows_layer_policy or is_compressed(name, shape, config):
            chosen.append(columns[-1])
        offset += numel
    slots = []
    rest = [column for column in columns if column not in chosen]
    for kind, label, members in ((method, "compressed", chosen), (Dense, "dense", rest)):
        if members:
            sizes = tuple((name, part.stop - part.start) for name, part in members)
            spec = BucketSpec(f"{unit}/{label}", sizes, ranks, rank, device, seed)
            slots.append(Slot(kind(config, spec, kernels), [part for _, part in members]))
    return Bucket(unit, columns, slots)


def describe_policy(buckets: Iterable[Bucket]) -> list[RoleSummary]:
    """Elements and gradient bytes per step by role, before and after compression; elements count padding."""
    summary: dict[str, RoleSummary] = {}
    for compressor in (slot.compressor for bucket in buckets for slot in bucket.slots):
        spec = compressor.spec
        for parameter, numel in spec.parameters:
            line = summary.setdefault(role_of(parameter), RoleSummary(role_of(parameter)))
            line.parameters += numel * spec.ranks
            line.compressed += numel * spec.ranks if compressor.compresses else 0
            line.dense_bytes += (spec.ranks - 1) * numel * 4
            line.sent_bytes += round(compressor.steady_bytes * numel / spec.numel)
    return list(summary.values())
