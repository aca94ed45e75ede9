"""How a unit's weights travel: whole, rounded, or as differences to a replica that every rank keeps.

FSDP2 gathers a unit's parameters before forward and again before backward, and in every micro-batch and validation.
With a replica only the first gather after an optimizer step sends anything: the owner's difference, quantised, which
every rank adds to its replica, the owner, too, so that all ranks compute with the same weights (SDP4Bit, NeurIPS 2024,
section 4.1, for ZeRO-1; here for FSDP2). What rounding misses is part of the next difference. Whether a gather is the
first of a step follows from the number of optimizer steps, never from the data.

Shape letters: W ranks, N elements of one shard of a unit, M bytes of codes, K scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor

from tagc.codec.delta import delta_bytes
from tagc.comm.exchange import Exchange
from tagc.comm.fsdp2 import Unit
from tagc.comm.stopwatch import Stopwatch
from tagc.config import WeightsConfig
from tagc.errors import UserError

HASH_EVERY = 100  # steps between comparisons of the replicas over the ranks
_CHUNK = 1 << 20
_HASH_MODULUS = (1 << 31) - 1  # a float64 holds sums of these exactly


def _view_words(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def sum_words(tensor: Tensor) -> Tensor:
    """int64 scalar that a change of any one element changes, in one pass: for every gather."""
    return _view_words(tensor).sum(dtype=torch.int64)


def hash_tensor(tensor: Tensor) -> Tensor:
    """float64 scalar that depends on every bit and its place, below 2**31, in several passes; equal on every device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    words = _view_words(tensor)
    for begin in range(0, words.numel(), _CHUNK):
        part = words[begin : begin + _CHUNK].long()
        place = torch.arange(begin, begin + len(part), device=tensor.device) % 65521 + 1
        total = (total + (part % _HASH_MODULUS * place).sum()) % _HASH_MODULUS
    return total.double()


class UnitGather(AllGather):
    """One unit's all-gather: ``weights`` other than ``full``."""

    def __init__(
        self, unit: Unit, config: WeightsConfig, exchange: Exchange, stopwatch: Stopwatch, kernels: ModuleType
    ) -> None:
        """Errors: ``UserError`` if there is no memory for the replica."""
        self.unit, self.config = unit, config
        self._exchange, self._stopwatch, self._kernels = exchange, stopwatch, kernels
        self._ranks, self._rank = unit.group.size(), unit.group.rank()
        self._bits, self._rotate = config.bits, config.rotate_seed
        self.numel = unit.shard_numel  # N
        self.why_full = self._explain_full()
        self.replica_WN: Tensor | None = None
        if config.keeps_replica and self.why_full is None:
            dtype = unit.gather_dtype if config.replica_dtype == "auto" else getattr(torch, config.replica_dtype)
            try:
                self.replica_WN = torch.zeros(self._ranks, self.numel, dtype=dtype, device=unit.device)
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                nbytes = self._ranks * self.numel * dtype.itemsize
                raise UserError(
                    f"weights={config.name} keeps a replica, and there is no memory for the {nbytes:,} bytes of unit "
                    f"{unit.name} ({error}); set weights.replica_dtype=bfloat16, or weights=int8, which keeps none"
                ) from None
        self.step = -1  # the optimizer steps at the last gather that sent
        self.is_exact = False  # whether the replica holds all ranks' state; else the next gather is a dense round
        self.restores = False  # whether the dense round sends the own slice of a checkpoint
        self._sent_sum: Tensor | None = None  # of the own shard at the last gather that sent
        self.changed = torch.zeros((), dtype=torch.float64, device=unit.device)  # outside the optimizer
        self.unit_step = 0  # optimizer steps so far; WeightGathers sets it
        self.sent_bytes = self.dense_bytes = 0  # by the last gather that sent; by dense rounds since the beginning

    def _explain_full(self) -> str | None:
        unit, full_numel = self.unit, self._ranks * self.numel
        if unit.gather_dtype not in (torch.float32, torch.bfloat16):
            return f"it gathers {str(unit.gather_dtype).removeprefix('torch.')}, or mixes dtypes"
        if full_numel < self.config.min_numel:
            return f"fewer than weights.min_numel={self.config.min_numel} elements"
        return None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer: FSDP2 writes the own shard into it before the gather, so it cannot be the replica itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill output_tensor [W * N] with every rank's weights; input_tensor [N] is a view of it: the own shard."""
        is_whole = group.size() == self._ranks and input_tensor.numel() == self.numel
        if self.why_full is not None or not is_whole:  # an int reshard_after_forward gathers parts of what was gathered
            self._gather(output_tensor, input_tensor, group)
        elif self.replica_WN is None:
            self._gather_rounded(output_tensor.view(self._ranks, -1), input_tensor, group)
        else:
            self._gather_replica(output_tensor.view(self._ranks, -1), input_tensor, group)

    def _gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        with self._stopwatch.span("exposed"), self._stopwatch.span("gather"):
            self._exchange.all_gather(output, shard, group, "param")
        self.sent_bytes = (self._ranks - 1) * shard.nbytes

    def _gather_rounded(self, output_WN: Tensor, input_N: Tensor, group: dist.ProcessGroup) -> None:
        """Stateless: every gather sends, and the owner computes with what the others get."""
        if self._bits is None:
            wire_WN = torch.empty_like(output_WN, dtype=torch.bfloat16)
            self._gather(wire_WN.view(-1), input_N.bfloat16(), group)
            output_WN.copy_(wire_WN)
            return
        codes_WM, scales_WK = self._exchange_codes(input_N, torch.zeros_like(input_N), group)
        with self._stopwatch.span("exposed"), self._stopwatch.span("decode"):
            output_WN.zero_()
            self._apply(codes_WM, scales_WK, output_WN)

    def _gather_replica(self, output_WN: Tensor, input_N: Tensor, group: dist.ProcessGroup) -> None:
        assert self.replica_WN is not None
        with self._exchange.always_metered():  # what a validation sends, the next step does not
            if not self.is_exact:
                self._send_whole(input_N, group)
            if self.step != self.unit_step:
                self._send_difference(input_N, group)
            else:
                self._note_change(input_N)
        with self._stopwatch.span("exposed"), self._stopwatch.span("decode"):
            output_WN.copy_(self.replica_WN)

    def _send_whole(self, input_N: Tensor, group: dist.ProcessGroup) -> None:
        """A dense round: the weights themselves, or after a restart the slices of the replica that every rank saved."""
        assert self.replica_WN is not None
        own_N = self.replica_WN[self._rank].clone() if self.restores else input_N.to(self.replica_WN.dtype)
        self._gather(self.replica_WN.view(-1), own_N, group)
        self.dense_bytes += self.sent_bytes
        self._refuse_nonfinite(self.replica_WN)
        self.is_exact = True
        if not self.restores:
            self.step, self._sent_sum = self.unit_step, sum_words(input_N)
        elif self.step == self.unit_step:
            self._sent_sum = sum_words(input_N)
        self.restores = False

    def _send_difference(self, input_N: Tensor, group: dist.ProcessGroup) -> None:
        assert self.replica_WN is not None
        codes_WM, scales_WK = self._exchange_codes(input_N, self.replica_WN[self._rank], group)
        with self._stopwatch.span("exposed"), self._stopwatch.span("decode"):
            self._apply(codes_WM, scales_WK, self.replica_WN)
            self.step, self._sent_sum = self.unit_step, sum_words(input_N)

    def _exchange_codes(self, input_N: Tensor, base_N: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Errors: ``UserError`` on every rank, before anything is applied, if a weight is NaN or Inf (on the CPU)."""
        config, ranks = self.config, self._ranks
        with self._stopwatch.span("exposed"), self._stopwatch.span("encode"):
            sent = self._kernels.encode_delta(input_N, base_N, bits=self._bits, block=config.block, rotate=self._rotate)
        codes_WM = sent.codes_M.new_empty(ranks, sent.codes_M.numel())
        scales_WK = sent.scales_K.new_empty(ranks, sent.scales_K.numel())
        with self._stopwatch.span("exposed"), self._stopwatch.span("gather"):
            self._exchange.all_gather_parts([(codes_WM, sent.codes_M), (scales_WK, sent.scales_K)], group, "param")
        self.sent_bytes = (ranks - 1) * (sent.codes_M.nbytes + sent.scales_K.nbytes)
        self._refuse_nonfinite(scales_WK)
        return codes_WM, scales_WK

    def _apply(self, codes_WM: Tensor, scales_WK: Tensor, replica_WN: Tensor) -> None:
        self._kernels.apply_delta(
            codes_WM, scales_WK, replica_WN, bits=self._bits, block=self.config.block, rotate=self._rotate
        )

    def _refuse_nonfinite(self, received: Tensor) -> None:
        if received.device.type == "cpu" and not received.isfinite().all():  # on CUDA this would wait for the device
            bad = (~received.isfinite()).view(self._ranks, -1).any(1).nonzero().flatten().tolist()
            self.is_exact = False
            raise UserError(
                f"the weights of unit {self.unit.name} are NaN or Inf on rank {', '.join(map(str, bad))}; nothing was "
                "applied. Load a checkpoint, and lower trainer.learning_rate or look for bad data"
            )

    def _note_change(self, input_N: Tensor) -> None:
        """Without a wait for the device; the end of the step's exchange tells all ranks."""
        if self._sent_sum is not None:
            self.changed = self.changed + (sum_words(input_N) != self._sent_sum)

    # --- state --------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Make the next gather a dense round."""
        self.is_exact, self.restores, self._sent_sum = False, False, None
        self.changed = torch.zeros_like(self.changed)

    def expected_bytes(self) -> int:
        """Closed form of what this rank sends in one gather that is no dense round."""
        if self.why_full is not None or self.config.name == "full":
            own = self.numel * self.unit.gather_dtype.itemsize
        elif self._bits is None:
            own = self.numel * torch.bfloat16.itemsize
        else:
            own = delta_bytes(self.numel, self._bits, self.config.block, self._rotate)
        return (self._ranks - 1) * own

    @property
    def sent_step(self) -> int:
        """After how many optimizer steps the replica was last sent to; -1 if it holds nothing."""
        return self.step if self.is_exact or self.restores else -1

    def own_slices(self) -> dict[str, DTensor]:
        """A copy of the own slice of the replica by parameter name, placed like the parameter."""
        return {} if self.replica_WN is None else self.unit.split_shard(self.replica_WN[self._rank])

    def restore(self, step: int, slices: Mapping[str, DTensor]) -> None:
        """Take slices for the own part of the replica, which was last sent to after ``step`` steps."""
        assert self.replica_WN is not None
        self.refresh()
        self.unit.join_shard(slices, self.replica_WN[self._rank])
        self.restores, self.step = step >= 0, step  # -1: it was saved before the first gather


class WeightGathers:
    """All units' gathers on one rank, and what they need of the step."""

    def __init__(
        self,
        units: Sequence[Unit],
        config: WeightsConfig,
        exchange: Exchange,
        stopwatch: Stopwatch,
        kernels: ModuleType,
    ) -> None:
        self.config, self._step = config, 0
        self.gathers = [UnitGather(unit, config, exchange, stopwatch, kernels) for unit in units]

    @property
    def step(self) -> int:
        """Optimizer steps so far; setting it makes the next gather of every unit send a difference."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        for gather in self.gathers:
            gather.unit_step = step

    @property
    def kept(self) -> list[UnitGather]:
        """Those with a replica."""
        return [gather for gather in self.gathers if gather.replica_WN is not None]

    @property
    def dense_bytes(self) -> int:
        """What this rank sent in dense rounds since the beginning."""
        return sum(gather.dense_bytes for gather in self.gathers)

    def expected_bytes(self) -> int:
        """Closed form of what this rank sends when every unit is gathered once, dense rounds apart."""
        return sum(gather.expected_bytes() for gather in self.gathers)

    @property
    def replica_bytes(self) -> int:
        """Memory that the replicas take on this rank."""
        return sum(gather.replica_WN.nbytes for gather in self.gathers if gather.replica_WN is not None)

    def describe(self) -> str:
        """One line: what a step's gathers send, and what they keep."""
        whole = sum((g.unit.group.size() - 1) * g.numel * g.unit.gather_dtype.itemsize for g in self.gathers)
        how = "once per step" if self.config.keeps_replica else "in every gather"
        kept = f"; replicas take {self.replica_bytes / 1e6:.2f} MB on each rank" if self.kept else ""
        return (
            f"weights travel as {self.config.name}: {self.expected_bytes() / 1e6:.2f} MB {how} instead of "
            f"{whole / 1e6:.2f} MB in every gather{kept}"
        )

    def explain_whole(self) -> list[str]:
        """One line for each unit whose weights travel whole all the same."""
        return [
            f"{g.unit.name}: its weights travel whole: {g.why_full}" for g in self.gathers if g.why_full is not None
        ]

    def refresh(self) -> None:
        """Make the next gather of every unit a dense round. To be called on all ranks."""
        for gather in self.gathers:
            gather.refresh()

    def note_load(self) -> None:
        """``load_state_dict`` has replaced weights: a dense round, unless a checkpoint's replicas wait, too."""
        for gather in self.gathers:
            if not gather.restores:
                gather.refresh()

    def numbers(self, step: int) -> dict[str, Tensor]:
        """For the message that closes a step: whether weights changed outside the optimizer, and hashes of replicas."""
        if not self.kept:
            return {}
        changed_U = torch.stack([gather.changed for gather in self.kept])
        hash_U = torch.zeros_like(changed_U)
        if step % HASH_EVERY == 0:
            hash_U = torch.stack([hash_tensor(g.replica_WN) for g in self.kept if g.replica_WN is not None])
        return {"weights_changed": changed_U, "replica_hash": hash_U}

    def check(self, numbers: Mapping[str, Tensor], step: int) -> None:
        """What all ranks conclude from :meth:`numbers` [R, units]. Errors: ``UserError`` on every rank."""
        if "replica_hash" not in numbers:
            return
        names = [gather.unit.name for gather in self.kept]
        changed_U = numbers["weights_changed"].sum(0) > 0
        if changed_U.any():
            self.refresh()
            shown = ", ".join(name for name, is_changed in zip(names, changed_U.tolist(), strict=True) if is_changed)
            raise UserError(
                f"step {step + 1}: the weights of {shown} were changed outside the optimizer, and the ranks computed "
                f"with weights={self.config.name}'s replica of the old ones; call refresh() of what tagc.compress "
                "returned, on every rank, after changing weights"
            )
        hash_RU = numbers["replica_hash"]
        differs_U = (hash_RU != hash_RU[:1]).any(0)
        if differs_U.any():
            shown = ", ".join(name for name, differs in zip(names, differs_U.tolist(), strict=True) if differs)
            raise UserError(
                f"step {step + 1}: the replicas of {shown} differ between ranks (weights={self.config.name}), by a "
                "fault of the machine or of tagc: start again from a checkpoint"
            )

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, DTensor]:
        """The own slices of the replicas by parameter name, which a checkpoint reshards like parameters."""
        return {name: part for gather in self.kept for name, part in gather.own_slices().items()}

    def sent_steps(self) -> Tensor:
        """int64: after how many optimizer steps each replica was last sent to; the same on every rank."""
        return torch.tensor([gather.sent_step for gather in self.kept], dtype=torch.int64)

    def restore(self, slices: Mapping[str, DTensor], sent_steps: Tensor) -> None:
        """Go on from what :meth:`state_dict` and :meth:`sent_steps` gave, also on other ranks.

        The next gather of every unit sends each rank's slice once.
        """
        for gather, step in zip(self.kept, sent_steps.tolist(), strict=True):
            gather.restore(step, slices)
