"""What happens to a unit's gradients in backward: encode, exchange, decode, once per step.

On the CPU a communication thread does this while backward goes on (``overlap``); the end of backward joins it. On CUDA
everything runs on FSDP2's reduce-scatter stream.

One bucket per FSDP unit. The layer policy splits a bucket's columns into slots, each with its own compressor; all
slots of a bucket travel in one exchange. The end of a backward that reduced closes the step
(:mod:`tagc.comm.step_close`), so gradients are complete and finite when ``backward()`` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.comm.buckets import Bucket, Slot, build_bucket
from tagc.comm.exchange import Exchange, peers_bytes
from tagc.comm.fsdp2 import ParameterAllGather, Unit
from tagc.comm.step_close import StepReport, check_finite, check_residuals, gather_numbers, send_returns
from tagc.comm.step_metrics import STATS, describe_layers, summarise_step
from tagc.comm.stopwatch import Stopwatch
from tagc.comm.weight_gather import WeightGathers
from tagc.compressors import COMPRESSORS, Compressor, Kind, Part
from tagc.config import CompressorConfig, WeightsConfig
from tagc.errors import UserError


@dataclass(frozen=True)
class SyncSettings:
    """What :class:`GradientSync` is told, as plain values; the same on every rank."""

    compressor: CompressorConfig
    method: type[Compressor] | None = None  # instead of the one that compressor.name names
    seed: int = 0  # of hashes and sampled positions
    overlap: bool = True  # on the CPU, exchange in a thread while backward goes on
    timeout_s: float | None = None  # of the thread's collectives; None: torch's default
    fidelity_every: int = 0  # every so many steps compare the decoded gradient with the dense mean; 0: never
    layers_every: int = 0  # every so many steps report every layer's numbers; 0: never
    weights: WeightsConfig = field(default_factory=WeightsConfig)  # how parameters travel

    @property
    def compressor_class(self) -> type[Compressor]:
        """The method's class."""
        return self.method or COMPRESSORS[self.compressor.name]

    @property
    def method_name(self) -> str:
        """The method as a user calls it."""
        return self.compressor.name if self.method is None else self.method.__name__


@dataclass
class _Told:
    loss: Tensor | None = None
    stop: bool = False


@dataclass
class _Progress:
    """Where a step stands."""

    is_closed: bool = False
    is_repeated: bool = False  # reduced again although the optimizer did not step: the first attempt is dropped
    report: StepReport | None = None
    fidelity: Tensor | None = None  # float64 [4]: dot, decoded, dense and error sums of squares
    pending: list[Future[None]] = field(default_factory=list)


class GradientSync:
    """All buckets of a sharded model on one rank.

    units: as :func:`tagc.comm.fsdp2.read_units` gives them; none where nothing is exchanged. group: the ranks that the
    units are sharded over. Errors: ``UserError`` when ``compressor.layers`` selects nothing.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        settings: SyncSettings,
        exchange: Exchange,
        stopwatch: Stopwatch,
        kernels: ModuleType,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.exchange, self.stopwatch, self.settings = exchange, stopwatch, settings
        self._group, self._device, self._kernels = group, device, kernels
        self._ranks, self._rank = group.size(), group.rank()
        self._thread: ThreadPoolExecutor | None = None
        self._told, self._progress = _Told(), _Progress()
        self.buckets: list[Bucket] = []
        # One rank has nobody to exchange with: FSDP2 calls no reduce-scatter.
        self._units = [unit for unit in units if unit.parameters] if self._ranks > 1 else []
        self.buckets = [self.build_bucket(unit, self._ranks, self._rank, device) for unit in self._units]
        self.weights = WeightGathers(self._gathered(units), settings.weights, exchange, stopwatch, kernels)
        self.begin_step(0)
        if not self._units:
            return
        if settings.compressor_class.follows_layer_policy and not any(s.compressor.compresses for s in self._slots()):
            raise UserError(
                f"compressor.layers={settings.compressor.layers} selects no parameter of at least "
                f"compressor.min_numel={settings.compressor.min_numel} elements; legal: all, non_attention, or name "
                "patterns such as '*.mlp.*|lm_head.*'"
            )

    def build_bucket(self, unit: Unit, ranks: int, rank: int, device: torch.device) -> Bucket:
        """A fresh bucket of ``unit`` as a rank among ``ranks`` has it, also of another run's."""
        settings = self.settings
        return build_bucket(
            *(settings.compressor, settings.compressor_class, settings.seed, unit.name, unit.parameters),
            *(ranks, rank, device, self._kernels),
        )

    def _gathered(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Units whose gathers are not FSDP's own: with replicas also the frozen ones, which then send once."""
        if self.settings.weights.name == "full":
            return []
        return units if self._ranks > 1 else []

    def attach(self) -> None:
        """Route the units' collectives through this object. To be called on all ranks of the group."""
        if not self._units:
            return
        if self.settings.overlap and self._device.type == "cpu":
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradient-exchange")
            # The parameter all-gathers go on in the mesh's group meanwhile; a new group does not inherit its timeout.
            timeout_s = self.settings.timeout_s
            self._thread_group = dist.new_group(
                dist.get_process_group_ranks(self._group),
                timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
                use_local_synchronization=True,
            )
        whole = ParameterAllGather(self.exchange, self.stopwatch)
        for unit, bucket in zip(self._units, self.buckets, strict=True):
            unit.attach(partial(self._reduce, unit, bucket))
            unit.attach_gather(whole)
        for gather in self.weights.gathers:
            gather.unit.attach_gather(gather)

    def detach(self) -> None:
        """Give the units their own collectives back."""
        for unit in {id(u): u for u in (*self._units, *(g.unit for g in self.weights.gathers))}.values():
            unit.detach()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _slots(self) -> list[Slot]:
        return [slot for bucket in self.buckets for slot in bucket.slots]

    @property
    def units(self) -> list[Unit]:
        """The units whose gradients are exchanged, in the order of :attr:`buckets`."""
        return self._units

    def explain_dense(self) -> list[str]:
        """One line for each bucket that this configuration always sends dense although the policy selected it."""
        return [line for slot in self._slots() if (line := slot.compressor.explain_dense())]

    def expected_bytes(self, step: int) -> dict[Kind, int]:
        """Closed form of this rank's gradient bytes at ``step``, by kind, without returns."""
        total: dict[Kind, int] = {"value": 0, "index": 0}
        for slot in self._slots():
            for kind, nbytes in slot.compressor.expected_bytes(step).items():
                total[kind] += nbytes
        return total

    @property
    def residual_bytes(self) -> int:
        """Memory that the residuals take on this rank."""
        return sum(slot.compressor.residual_bytes for slot in self._slots())

    @property
    def replica_bytes(self) -> int:
        """Memory that the replicas of the weights take on this rank."""
        return self.weights.replica_bytes

    def residuals(self) -> dict[str, Tensor]:
        """This rank's residual by parameter name: float32 [W, padded shard elements]."""
        return {name: view for slot in self._slots() for name, view in slot.compressor.residuals().items()}

    def compressor_state(self) -> dict[str, Tensor]:
        """All that later steps depend on, of this rank alone: ``<slot>/<name>`` to tensor. Nothing is copied."""
        return {
            f"{slot.compressor.spec.name}/{name}": tensor
            for slot in self._slots()
            for name, tensor in slot.compressor.state_dict().items()
        }

    def load_compressor_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`compressor_state` gave on the same rank of as many ranks."""
        for slot in self._slots():
            prefix = f"{slot.compressor.spec.name}/"
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            slot.compressor.load_state_dict(own)

    # --- one step -----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Announce the step whose gradients come next (counted from 0)."""
        wait(self._progress.pending)  # of a backward that an error ended: the thread may still encode
        self.step = self.weights.step = step
        self._progress = _Progress()
        every = self.settings.fidelity_every
        if every and step % every == 0:
            self._progress.fidelity = torch.zeros(4, dtype=torch.float64, device=self._device)
        for bucket in self.buckets:
            bucket.column_sums, bucket.is_reduced = None, False
        for slot in self._slots():
            slot.undo()  # nothing, unless an error ended the last step

    def tell(self, loss: Tensor, stop: bool = False) -> None:
        """Add to the message that closes the step: this rank's loss, 0-dim, and whether it was asked to stop."""
        self._told = _Told(loss.detach(), stop)

    def end_backward(self) -> None:
        """Close the step if this backward reduced anything.

        Errors: ``UserError`` on every rank, before anything is updated, if a gradient is NaN or Inf.
        """
        if not self._progress.is_closed and any(bucket.is_reduced for bucket in self.buckets):
            self._close()

    def take_report(self) -> StepReport:
        """The report of this step; closes it now if no reduction did, as on one rank.

        Errors: ``UserError`` on every rank, before anything is updated, if a gradient is NaN or Inf.
        """
        if self._progress.report is None:
            self._close()
        assert self._progress.report is not None
        return self._progress.report

    @property
    def last_report(self) -> StepReport | None:
        """The report of this step, if it is closed."""
        return self._progress.report

    def _reduce(
        self,
        unit: Unit,
        bucket: Bucket,
        gradient_WS: Tensor,
        output_S: Tensor,
        divisor: int,
        group: dist.ProcessGroup,
        may_wait: bool,
    ) -> None:
        """Reduce one bucket over ranks, [W, S] -> [S]: now, or in the communication thread until the step is closed.

        may_wait: nobody reads ``output_S`` before the end of backward.
        """
        was_aborted = bucket.is_reduced and not unit.holds_gradients()  # in the middle, by an error; zero_grad() since
        if self._progress.is_closed or was_aborted:  # the optimizer did not step: the first attempt is dropped
            self.begin_step(self.step)
            self._progress.is_repeated = True
        if bucket.is_reduced or (self._progress.is_repeated and unit.holds_gradients()):
            raise UserError(
                f"unit {bucket.name} was reduced twice in step {self.step}: reduce once per optimizer step, with "
                "set_requires_gradient_sync(False) for all micro-batches but the last, and call "
                "optimizer.zero_grad() after a step that was skipped"
            )
        bucket.is_reduced = True
        if self._thread is not None and self._progress.fidelity is None and may_wait:
            work = partial(self._reduce_now, bucket, gradient_WS, output_S, divisor, self._thread_group)
            self._progress.pending.append(self._thread.submit(work))
            return
        with self.stopwatch.span("exposed"):
            if self._thread is None:
                self._reduce_now(bucket, gradient_WS, output_S, divisor, group)
            else:  # in turn with what the thread does: all ranks must send in the same order
                self._thread.submit(
                    self._reduce_now, bucket, gradient_WS, output_S, divisor, self._thread_group
                ).result()

    def _reduce_now(
        self, bucket: Bucket, gradient_WS: Tensor, output_S: Tensor, divisor: int, group: dist.ProcessGroup
    ) -> None:
        with record_function(f"bucket {bucket.name}"):  # a profiler's trace shows whose encode, exchange and decode
            self._encode_exchange_decode(bucket, gradient_WS, output_S, divisor, group)

    @torch.no_grad()
    def _encode_exchange_decode(
        self, bucket: Bucket, gradient_WS: Tensor, output_S: Tensor, divisor: int, group: dist.ProcessGroup
    ) -> None:
        fidelity = self._progress.fidelity
        with self.stopwatch.span("encode"):
            bucket.column_sums = torch.stack([gradient_WS[:, part].sum() for _, part in bucket.parameters])
        dense_S = self._reduce_dense(gradient_WS, group) if fidelity is not None else None
        with self.stopwatch.span("encode"):
            payloads = []
            for slot in bucket.slots:
                slot.payload = payload = slot.compressor.encode(slot.take(gradient_WS), self.step)
                slot.sent_bytes = sum(peers_bytes(part, self._ranks) for part in payload.parts)
                payloads.append(payload)
        with self.stopwatch.span("exchange"):
            received = iter(
                self.exchange.reduce_scatter([part for payload in payloads for part in payload.parts], group)
            )
        with self.stopwatch.span("decode"):
            for slot, payload in zip(bucket.slots, payloads, strict=True):
                slot.put(output_S, slot.compressor.decode([next(received) for _ in payload.parts], payload))
            if divisor != 1:
                output_S /= divisor
        if dense_S is not None and fidelity is not None:
            with self.stopwatch.span("diagnostic"):
                a, b = output_S.double(), dense_S.double() / divisor
                fidelity += torch.stack([a.dot(b), a.dot(a), b.dot(b), (a - b).square().sum()])

    def _reduce_dense(self, gradient_WS: Tensor, group: dist.ProcessGroup) -> Tensor:
        with self.stopwatch.span("diagnostic"):
            return self.exchange.reduce_scatter([Part(gradient_WS, "sum", "value")], group, diagnostic=True)[0]

    @torch.no_grad()
    def _close(self) -> None:
        progress, told = self._progress, self._told
        progress.is_closed, self._told = True, _Told()
        with self.stopwatch.span("exposed"):
            for work in progress.pending:
                work.result()
            progress.pending.clear()
        slots = [slot for slot in self._slots() if slot.compressor.follows_layer_policy]
        zeros = torch.zeros(4, dtype=torch.float64, device=self._device)
        extra = {
            "loss": zeros[:1] * math.nan if told.loss is None else told.loss.view(1),
            "stop": zeros[:1] + float(told.stop),
            "fidelity": zeros if progress.fidelity is None else progress.fidelity,
            **self.weights.numbers(self.step),
        }
        with self.stopwatch.span("exposed"), self.stopwatch.span("exchange"):
            numbers = gather_numbers(self.buckets, slots, extra, self.exchange, self._group)
        stats_RSF = numbers["stats"].view(self._ranks, len(slots), len(STATS))
        try:
            check_finite(self.buckets, numbers["column_sums"], self.step)
            check_residuals(slots, stats_RSF[..., STATS.index("residual_squared")], self.step)
            self.weights.check(numbers, self.step)
        except UserError:  # on every rank, so that residuals are those before this step everywhere
            for slot in self._slots():
                slot.undo()
            raise
        unresolved_RS = stats_RSF[..., STATS.index("unresolved")]
        send_returns(slots, unresolved_RS, self.exchange, self.stopwatch, self._group)
        progress.report = self._conclude(slots, numbers, stats_RSF)
        for slot in self._slots():
            slot.payload = None  # and with it the state before this step

    def _conclude(self, slots: Sequence[Slot], numbers: dict[str, Tensor], stats_RSF: Tensor) -> StepReport:
        """The step's report; every compressor decides how its next step travels."""
        metrics = summarise_step(slots, stats_RSF)
        report = StepReport(numbers["loss"].mean().item(), bool(numbers["stop"].any()), metrics)
        every = self.settings.layers_every
        if every and self.step % every == 0:
            report.layers = describe_layers(slots, stats_RSF)
        if self._progress.fidelity is not None:
            dot, decoded, dense, error = numbers["fidelity"].sum(0).tolist()
            report.metrics["fidelity_cosine"] = dot / math.sqrt(decoded * dense) if decoded and dense else None
            report.metrics["fidelity_rel_error"] = math.sqrt(error / dense) if dense else None
        for slot, stats_RF in zip(slots, stats_RSF.unbind(1), strict=True):
            largest = dict(zip(STATS, stats_RF.amax(0).tolist(), strict=True))
            payload = slot.payload
            if payload and (message := slot.compressor.adapt(payload, largest["densest"], largest["peers_union"])):
                report.messages.append(message)
        return report
