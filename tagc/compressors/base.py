"""The contract of a compressor.

``encode`` turns a bucket of gradients into a :class:`Payload`: tensors in sending order, each with the exchange it
needs, and what ``decode`` needs again. ``decode`` turns what arrived into the summed shard. Neither communicates. What
arrived is already reduced as each part asks: added in fp32, OR-ed, or only stacked. Between the two a compressor keeps
nothing but its state; a step that failed is taken back with ``undo``.

Here is what all methods share: dense steps, their bytes, and the residual. A method adds its message.

Shape letters: W ranks, N elements of one shard, B bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import ClassVar, Literal
from zlib import crc32

import torch
from torch import Tensor

from tagc.codec.bitmap import unpack_bits
from tagc.compressors.residual import Residual
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


@dataclass
class Payload:
    """One bucket's step on one rank: what ``encode`` returns and ``decode``, returns and ``undo`` take."""

    parts: Sequence[Part]
    step: int
    went_dense: bool = False
    own_N: Tensor | None = None  # float32: the own shard's values, which never travel
    sent_index_WB: Tensor | None = None  # uint8 bitmaps of the positions sent, where values may have to be returned
    unresolved_B: Tensor | None = None  # uint8 bitmap of the own shard's positions to return; set by decode
    stats: BucketStats = field(default_factory=BucketStats)  # encode and decode both add to it
    state_before: dict[str, Tensor] = field(default_factory=dict)  # for undo; empty it when the step has succeeded


class Compressor(ABC):
    """One bucket's encoder, decoder and state.

    A method gives ``message_bytes``, ``encode_message`` and ``decode_message``, and sets ``dense_until`` where it has
    a rule of its own.
    """

    #: whether the layer policy decides which parameters come here (a dense method takes the whole bucket)
    follows_layer_policy: ClassVar[bool] = True
    #: whether what is sent differs from the fp32 gradient
    compresses: ClassVar[bool] = True
    #: what is kept from step to step; None: nothing
    residual_type: ClassVar[type[Residual] | None] = None
    #: attributes beside the residual that later steps depend on: tensors, which a checkpoint keeps for every rank
    state_tensors: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: CompressorConfig, spec: BucketSpec, kernels: ModuleType) -> None:
        self.config, self.spec, self.kernels = config, spec, kernels
        by_policy = self.follows_layer_policy  # a dense method reads no key
        self.wire_dtype: torch.dtype = getattr(torch, config.value_dtype) if by_policy else torch.float32
        self.residual: Residual | None = None
        if self.residual_type is not None:
            dtype = getattr(torch, config.residual_dtype)
            self.residual = self.residual_type((spec.ranks, spec.numel), dtype, spec.device, kernels)
        self.dense_until: float = (
            config.warmup_steps if by_policy else math.inf
        )  # steps before this one travel dense; math.inf: all

    # --- the method's message -----------------------------------------------------------------------------------

    @abstractmethod
    def message_bytes(self) -> dict[Kind, int]:
        """Closed form of the bytes sent to all peers in a step that is not dense, by kind."""

    @abstractmethod
    def encode_message(self, gradient_WN: Tensor, step: int) -> Payload:
        """Encode a step that is not dense. gradient_WN: as for :meth:`encode`."""

    @abstractmethod
    def decode_message(self, received: Sequence[Tensor], payload: Payload) -> Tensor:
        """Decode a step that is not dense: received parts -> fp32 [N], the sum."""

    # --- one step -----------------------------------------------------------------------------------------------

    def encode(self, gradient_WN: Tensor, step: int) -> Payload:
        """Turn gradients into a payload. gradient_WN: float32 [W, N], contiguous; may be overwritten."""
        before = {name: tensor.clone() for name, tensor in self._tensors().items()}
        payload = (
            self._encode_dense(gradient_WN, step) if self.is_dense(step) else self.encode_message(gradient_WN, step)
        )
        payload.state_before = before
        return payload

    def decode(self, received: Sequence[Tensor], payload: Payload) -> Tensor:
        """Turn the reduced parts into the *sum* of the shard: fp32 [N]. The payload's parts are released.

        received: in payload order, without the W dimension unless the part is only stacked.
        """
        total_N = received[0] if payload.went_dense else self.decode_message(received, payload)
        payload.parts, payload.own_N = (), None
        return total_N

    def undo(self, payload: Payload) -> None:
        """Take back what encoding ``payload`` changed: the state is bitwise what it was before."""
        self._load_tensors(payload.state_before)

    def unresolved_positions(self, payload: Payload) -> Tensor | None:
        """int64 positions in the own shard whose peers' values must go back to them; None if there are none."""
        if payload.unresolved_B is None:
            return None
        return unpack_bits(payload.unresolved_B, self.spec.numel).nonzero().squeeze(1)

    def restore(self, payload: Payload, owner: int, positions: Tensor) -> None:
        """Put the values that ``payload`` sent for ``positions`` of ``owner``'s shard back into the residual."""
        assert self.residual is not None and payload.sent_index_WB is not None
        self.residual.restore(owner, positions, payload.sent_index_WB)

    def _encode_dense(self, gradient_WN: Tensor, step: int) -> Payload:
        """Send gradient plus residual whole; with error feedback the wire's rounding is kept."""
        residual = self.residual
        x_WN = gradient_WN if residual is None else residual.add(gradient_WN, self.config.residual_decay)
        wire_WN = x_WN.to(self.wire_dtype)
        payload = Payload([Part(wire_WN, "sum", "value")], step, went_dense=True)
        self.measure_dense(x_WN, payload.stats)
        if residual is not None:
            rounding = (x_WN, wire_WN) if self.config.error_feedback else None
            payload.stats.residual_squared = residual.keep_rounding(rounding)
        return payload

    def measure_dense(self, x_WN: Tensor, stats: BucketStats) -> None:  # noqa: B027 (most methods count nothing)
        """Count what a method needs to know of a dense step. x_WN: float32, gradient plus residual."""

    # --- dense or not -------------------------------------------------------------------------------------------

    def is_dense(self, step: int) -> bool:
        """Whether the next encode of ``step`` travels dense; the same on every rank. Of a past step: its payload."""
        return step < self.dense_until

    def adapt(self, payload: Payload, densest: float, peers_union: float) -> str | None:
        """Decide how the next step travels, from what all ranks measured (the same numbers everywhere).

        densest and peers_union: the largest of :class:`BucketStats` over the ranks, NaN where not measured. Returns a
        log line when the decision changes.
        """
        return None

    def explain_dense(self) -> str | None:
        """Reason why this bucket can never be compressed under this configuration; None if it can."""
        return None

    def is_too_large(self) -> bool:
        """Whether a dense step would be smaller than the message, and may take its place."""
        return self.config.dense_fallback and sum(self.message_bytes().values()) > self.dense_bytes

    def explain_size(self, remedy: str) -> str | None:
        """:meth:`explain_dense` of a message that is larger than a dense step; None if it is not."""
        if not self.is_too_large():
            return None
        return (
            f"{self.spec.name}: dense, its {self.config.name} message would be larger "
            f"({sum(self.message_bytes().values())} against {self.dense_bytes} bytes); {remedy}"
        )

    @property
    def dense_bytes(self) -> int:
        """Bytes this rank sends in a dense step: every peer gets its shard whole."""
        return (self.spec.ranks - 1) * self.spec.numel * self.wire_dtype.itemsize

    def expected_bytes(self, step: int) -> dict[Kind, int]:
        """Closed form of the bytes this rank sends to its peers at ``step``, by kind (returns are not foreseeable)."""
        return {"value": self.dense_bytes} if self.is_dense(step) else self.message_bytes()

    @property
    def steady_bytes(self) -> int:
        """The same past any warm-up and in sum."""
        return self.dense_bytes if self.dense_until == math.inf else sum(self.message_bytes().values())

    # --- state --------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        kept = {} if self.residual is None else self.residual.state()
        return kept | {name: getattr(self, name) for name in self.state_tensors}

    def _load_tensors(self, tensors: dict[str, Tensor]) -> None:
        if self.residual is not None:
            self.residual.load(tensors)
        for name in self.state_tensors:
            setattr(self, name, tensors[name].to(self.spec.device))

    def state_dict(self) -> dict[str, Tensor]:
        """All that later steps depend on, by name. Nothing is copied."""
        return self._tensors()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` gave at the same rank, ranks and configuration."""
        self._load_tensors(state)

    def residuals(self) -> dict[str, Tensor]:
        """Residual by parameter name: float32 [W, padded shard elements], a copy. Empty if none."""
        return {} if self.residual is None else self.spec.split_parameters(self.residual.values())

    def load_residuals(self, residuals: dict[str, Tensor]) -> None:
        """Take over residuals as :meth:`residuals` gives them, for a run that goes on with other ranks."""
        if self.residual is not None:
            self.residual.keep(torch.cat([residuals[name] for name, _ in self.spec.parameters], dim=1))

    @property
    def ratio(self) -> float | None:
        """Elements of a shard per cell of its sketch, at present; None for a method without a sketch."""
        return None

    @property
    def residual_bytes(self) -> int:
        """Memory that this bucket's residual takes on this rank; its copy for undo takes as much during a step."""
        return 0 if self.residual is None else self.residual.nbytes
