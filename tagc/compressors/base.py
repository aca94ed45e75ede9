"""The contract of a compressor.

``encode`` turns a bucket of gradients into a payload: tensors in sending order, each with the exchange it needs.
``decode`` turns what arrived into the summed shard. Neither communicates. What arrived is already reduced as each part
asks: added in fp32, OR-ed, or only stacked.

Shape letters: W ranks, N elements of one shard, B bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

from tagc.config import CompressorConfig

Kind = Literal["value", "index", "return", "param"]


@dataclass(frozen=True)
class BucketSpec:
    """The part of an FSDP bucket that one compressor handles."""

    name: str
    parameters: tuple[tuple[str, int], ...]  # (name, padded elements of one shard), in bucket order
    ranks: int  # W
    rank: int
    device: torch.device
    seed: int

    @property
    def numel(self) -> int:
        """N, elements of one shard, padding included."""
        return sum(numel for _, numel in self.parameters)

    @property
    def own_seed(self) -> int:
        """A seed that differs between buckets and is the same on every rank."""
        return crc32(f"{self.seed}/{self.name}".encode())

    def split_parameters(self, values_WN: Tensor) -> dict[str, Tensor]:
        """Cut a tensor of the bucket's shape into views by parameter name."""
        parts = values_WN.split([numel for _, numel in self.parameters], dim=1)
        return {name: part for (name, _), part in zip(self.parameters, parts, strict=True)}


@dataclass(frozen=True)
class Part:
    """One tensor to send: row w goes to rank w, and what a rank receives is reduced over the senders."""

    tensor: Tensor  # [W, ...], contiguous
    # sum: added in fp32 in rank order; or: bitwise, uint8; stack: not reduced, row w is what rank w sent
    reduce: Literal["sum", "or", "stack"]
    kind: Kind


@dataclass
class BucketStats:
    """Counts of one encode and decode, as 0-dim tensors so that nothing waits for the device. None: not measured."""

    kept: Tensor | None = None  # elements this rank selected, over all shards
    densest: Tensor | None = None  # elements this rank selected for the shard it selected most for
    union: Tensor | None = None  # elements of this rank's own shard that any rank selected
    peers_union: Tensor | None = None  # elements of the own shard that its sketch holds
    unresolved: Tensor | None = None  # elements of the own shard that peeling could not separate
    residual_squared: Tensor | None = None  # squared norm of what this rank keeps, before returns
    threshold: Tensor | None = None  # magnitude above which this rank selected, mean over shards


class Compressor(ABC):
    """One bucket's encoder, decoder and state."""

    #: whether the layer policy decides which parameters come here (a dense method takes the whole bucket)
    follows_layer_policy = True
    #: attributes that hold what later steps depend on: tensors, which a checkpoint keeps for every rank
    state_tensors: tuple[str, ...] = ()

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        self.config, self.spec, self.kernels = config, spec, kernels
        self.stats = BucketStats()

    @abstractmethod
    def encode(self, gradient_WN: Tensor, step: int) -> Sequence[Part]:
        """Turn gradients into a payload. gradient_WN: float32 [W, N], contiguous; may be overwritten."""

    @abstractmethod
    def decode(self, received: Sequence[Tensor], step: int) -> Tensor:
        """Turn the reduced parts into the *sum* of the shard: fp32 [N].

        received: in payload order, without the W dimension unless the part is only stacked.
        """

    @abstractmethod
    def expected_bytes(self, step: int) -> dict[Kind, int]:
        """Closed form of the bytes this rank sends to its peers at ``step``, by kind (returns are not foreseeable)."""

    def unresolved_positions(self) -> Tensor | None:
        """int64 positions in the own shard whose peers' values must go back to them; None if there are none."""
        return None

    def restore(self, owner: int, positions: Tensor) -> None:
        """Put the values that this rank sent for ``positions`` of ``owner``'s shard back into the residual."""
        raise NotImplementedError(f"{type(self).__name__} reports unresolved positions and must take them back")

    def adapt(self, step: int, densest: float, peers_union: float) -> str | None:
        """Decide how the next step travels, from what all ranks measured (the same numbers everywhere).

        densest and peers_union: the largest of :class:`BucketStats` over the ranks, NaN where not measured. Returns a
        log line when the decision changes.
        """
        return None

    def is_dense(self, step: int) -> bool:
        """Whether the bucket travels dense at ``step``; the same on every rank. To be asked before :meth:`adapt`."""
        return False

    def explain_dense(self) -> str | None:
        """Why this configuration always sends the bucket dense, for the log; None if it does not."""
        return None

    def residuals(self) -> dict[str, Tensor]:
        """Residual by parameter name: float32 [W, padded shard elements], a copy. Empty if none."""
        return {}

    def load_residuals(self, residuals: dict[str, Tensor]) -> None:
        """Take over residuals as :meth:`residuals` gives them, for a run that goes on with other ranks."""
        if residuals:
            raise NotImplementedError(f"{type(self).__name__} keeps residuals and must take them over")

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on, by name; a tensor that does not exist yet is left out. Nothing is copied."""
        found = {name: getattr(self, name) for name in self.state_tensors}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` gave at the same rank, ranks and configuration."""
        for name in self.state_tensors:
            value = state.get(name)
            setattr(self, name, None if value is None else value.to(self.spec.device))

    @property
    def ratio(self) -> float | None:
        """Elements of a shard per cell of its sketch, at present; None for a method without a sketch."""
        return None

    @property
    def residual_bytes(self) -> int:
        """Memory that this bucket's residual takes on this rank."""
        return 0
