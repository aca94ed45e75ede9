"""What happens to a unit's gradients between backward and the optimizer: encode, exchange, decode, once per step.

On the CPU a communication thread does this while backward goes on (``trainer.overlap``); it is joined before clipping.
On CUDA everything runs on FSDP2's reduce-scatter stream.

One bucket per FSDP unit. The layer policy splits a bucket's columns into slots, each with its own compressor; all
slots of a bucket travel in one exchange. After backward, :meth:`GradientSync.finish_step` gathers a few numbers per
slot from all ranks in one small message: they carry the metrics, the check for NaN, the return of values that could
not be peeled, and the decision between sketch and dense, so that all ranks decide alike without another collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from tagc.comm.buckets import Bucket, Slot, build_bucket
from tagc.comm.exchange import Exchange
from tagc.comm.fsdp2 import GradientReduceScatter, ParameterAllGather, attach
from tagc.comm.step_metrics import STATS, Metrics, describe_layers, summarise_step
from tagc.comm.stopwatch import Stopwatch
from tagc.compressors import COMPRESSORS, Dense, Kind, Part
from tagc.config import Config
from tagc.errors import UserError


@dataclass
class StepReport:
    """What :meth:`GradientSync.finish_step` learned, the same on every rank."""

    loss: float
    stop: bool = False  # a rank was asked to stop
    metrics: Metrics = field(default_factory=dict)
    layers: list[Metrics] = field(default_factory=list)  # every ``logging.histograms_every`` steps
    messages: list[str] = field(default_factory=list)


class GradientSync:
    """All buckets of a sharded model on one rank.

    units: (name, module) of every FSDP unit; parameters: each unit's (name, full shape) in FSDP's order.
    Errors: ``UserError`` when ``compressor.layers`` selects nothing.
    """

    def __init__(
        self,
        config: Config,
        units: Sequence[tuple[str, FSDPModule]],
        parameters: dict[str, list[tuple[str, torch.Size]]],
        exchange: Exchange,
        stopwatch: Stopwatch,
        kernels: ModuleType,
        device: torch.device,
    ) -> None:
        self.exchange, self.stopwatch = exchange, stopwatch
        self._config, self._device = config, device
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD
        self._ranks, self._rank = self._group.size(), self._group.rank()
        self._step = 0
        self._fidelity: Tensor | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self.buckets: list[Bucket] = []
        if self._ranks == 1:
            return  # nobody to exchange with: FSDP2 calls no reduce-scatter
        self.buckets = [
            build_bucket(config, name, parameters[name], self._ranks, self._rank, device, kernels) for name, _ in units
        ]
        method = COMPRESSORS[config.compressor.name]
        if method.follows_layer_policy and all(type(slot.compressor) is Dense for slot in self._slots()):
            raise UserError(
                f"compressor.layers={config.compressor.layers} selects no parameter of at least "
                f"compressor.min_numel={config.compressor.min_numel} elements; legal: all, non_attention, or name "
                "patterns such as '*.mlp.*|lm_head.*'"
            )
        if config.trainer.overlap and device.type == "cpu":
            _check_dtypes(units)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradient-exchange")
            # The parameter all-gathers go on in the world's group meanwhile; a new group does not inherit its timeout.
            self._thread_group = dist.new_group(timeout=timedelta(seconds=config.cluster.timeout_s))
        all_gather = ParameterAllGather(exchange, stopwatch)
        for (_, module), bucket in zip(units, self.buckets, strict=True):
            numel = sum(slot.numel for slot in bucket.slots)
            attach(module, GradientReduceScatter(bucket.name, numel, partial(self._reduce, bucket)), all_gather)

    # --- set-up -------------------------------------------------------------------------------------------------

    def _slots(self) -> list[Slot]:
        return [slot for bucket in self.buckets for slot in bucket.slots]

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

    def residuals(self) -> dict[str, Tensor]:
        """This rank's residual by parameter name: float32 [W, padded shard elements]."""
        return {name: view for slot in self._slots() for name, view in slot.compressor.residuals().items()}

    # --- one step -----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Announce the step whose gradients come next (counted from 0)."""
        self._step = step
        every = self._config.logging.fidelity_every
        self._fidelity = (
            torch.zeros(4, dtype=torch.float64, device=self._device) if every and step % every == 0 else None
        )
        for bucket in self.buckets:
            bucket.column_sums, bucket.is_reduced = None, False

    def _reduce(
        self, bucket: Bucket, gradient_WS: Tensor, output_S: Tensor, divisor: int, group: dist.ProcessGroup
    ) -> None:
        """Reduce one bucket over ranks, [W, S] -> [S]: now, or in the communication thread until the step is closed.

        FSDP2 takes views of ``output_S`` for the sharded gradients and reads them no earlier than the optimizer.
        """
        if bucket.is_reduced:
            raise RuntimeError(f"unit {bucket.name} was reduced twice in step {self._step}; use one reduction per step")
        bucket.is_reduced = True
        if self._thread is not None and self._fidelity is None:
            work = partial(self._reduce_now, bucket, gradient_WS, output_S, divisor, self._thread_group)
            self._pending.append(self._thread.submit(work))
            return
        with self.stopwatch.span("exposed"):
            self._reduce_now(bucket, gradient_WS, output_S, divisor, group)

    def _reduce_now(
        self, bucket: Bucket, gradient_WS: Tensor, output_S: Tensor, divisor: int, group: dist.ProcessGroup
    ) -> None:
        with record_function(f"bucket {bucket.name}"):  # a profiler's trace shows whose encode, exchange and decode
            self._encode_exchange_decode(bucket, gradient_WS, output_S, divisor, group)

    def _encode_exchange_decode(
        self, bucket: Bucket, gradient_WS: Tensor, output_S: Tensor, divisor: int, group: dist.ProcessGroup
    ) -> None:
        with self.stopwatch.span("encode"):
            bucket.column_sums = torch.stack([gradient_WS[:, part].sum() for _, part in bucket.parameters])
        dense_S = self._reduce_dense(gradient_WS, group) if self._fidelity is not None else None
        with self.stopwatch.span("encode"):
            payloads = [slot.compressor.encode(slot.take(gradient_WS), self._step) for slot in bucket.slots]
        with self.stopwatch.span("exchange"):
            received = iter(self.exchange.reduce_scatter([part for parts in payloads for part in parts], group))
        with self.stopwatch.span("decode"):
            for slot, parts in zip(bucket.slots, payloads, strict=True):
                slot.put(output_S, slot.compressor.decode([next(received) for _ in parts], self._step))
            if divisor != 1:
                output_S /= divisor
        if dense_S is not None and self._fidelity is not None:
            with self.stopwatch.span("diagnostic"):
                a, b = output_S.double(), dense_S.double() / divisor
                self._fidelity += torch.stack([a.dot(b), a.dot(a), b.dot(b), (a - b).square().sum()])

    def _reduce_dense(self, gradient_WS: Tensor, group: dist.ProcessGroup) -> Tensor:
        with self.stopwatch.span("diagnostic"):
            return self.exchange.reduce_scatter([Part(gradient_WS, "sum", "value")], group, diagnostic=True)[0]

    def finish_step(self, loss: Tensor, stop: bool = False) -> StepReport:
        """Close the step on all ranks, before clipping. loss: this rank's mean loss, 0-dim. stop: it was asked to stop.

        Errors: ``UserError`` on every rank, before anything is updated, if a gradient is NaN or Inf.
        """
        slots = [slot for slot in self._slots() if slot.compressor.follows_layer_policy]
        with self.stopwatch.span("exposed"):
            for work in self._pending:
                work.result()
            self._pending.clear()
        numbers = self._gather_numbers(slots, loss, stop)
        self._check_finite(numbers["column_sums"])
        stats_RSF = numbers["stats"].view(self._ranks, len(slots), len(STATS))
        self._send_returns(slots, stats_RSF[..., STATS.index("unresolved")])
        stop = bool(numbers["stop"].any())
        report = StepReport(numbers["loss"].mean().item(), stop, summarise_step(slots, stats_RSF, self._step))
        every = self._config.logging.histograms_every
        if every and self._step % every == 0:
            report.layers = describe_layers(slots, stats_RSF, self._step)
        if self._fidelity is not None:
            dot, decoded, dense, error = numbers["fidelity"].sum(0).tolist()
            report.metrics["fidelity_cosine"] = dot / math.sqrt(decoded * dense) if decoded and dense else None
            report.metrics["fidelity_rel_error"] = math.sqrt(error / dense) if dense else None
        for slot, stats_RF in zip(slots, stats_RSF.unbind(1), strict=True):
            largest = dict(zip(STATS, stats_RF.amax(0).tolist(), strict=True))
            message = slot.compressor.adapt(self._step, largest["densest"], largest["peers_union"])
            if message:
                report.messages.append(message)
        return report

    def _gather_numbers(self, slots: Sequence[Slot], loss: Tensor, stop: bool) -> dict[str, Tensor]:
        """Every rank's numbers of this step: float64 [W, ...] by name, on the host (waits for the device)."""
        missing = torch.full((), math.nan, dtype=torch.float64, device=self._device)
        stats = [getattr(slot.compressor.stats, name) for slot in slots for name in STATS]
        sums = [bucket.column_sums for bucket in self.buckets if bucket.column_sums is not None]
        parts = {
            "loss": loss.detach().view(1),
            "stop": missing.new_full((1,), float(stop)),
            "stats": torch.stack([missing, *(missing if value is None else value for value in stats)])[1:],
            "fidelity": missing.new_zeros(4) if self._fidelity is None else self._fidelity,
            "column_sums": torch.cat([missing.new_zeros(0), *sums]),
        }
        own = torch.cat([part.to(torch.float64) for part in parts.values()])
        with self.stopwatch.span("exposed"), self.stopwatch.span("exchange"):
            gathered = self.exchange.gather_numbers(own, self._group).cpu()
        split = gathered.split([part.numel() for part in parts.values()], dim=1)
        return dict(zip(parts, split, strict=True))

    def _check_finite(self, column_sums_RP: Tensor) -> None:
        bad_RP = ~column_sums_RP.isfinite()
        if not bad_RP.any():
            return
        names = [name for bucket in self.buckets for name, _ in bucket.parameters]
        # Backward spreads a NaN from the loss towards the input, so the last unit's parameters come first.
        bad = [names[i] for i in reversed(bad_RP.any(0).nonzero().flatten().tolist())]
        ranks = bad_RP.any(1).nonzero().flatten().tolist()
        raise UserError(nonfinite_message(self._step, bad, ranks))

    def _send_returns(self, slots: Sequence[Slot], unresolved_RS: Tensor) -> None:
        """Tell the senders which values could not be peeled; they put them back into their residuals.

        All ranks know all counts, so in the usual step, with none, nothing is sent.
        """
        for slot, unresolved_R in zip(slots, unresolved_RS.unbind(1), strict=True):
            most = int(unresolved_R.nan_to_num().max())
            own = slot.compressor.unresolved_positions() if most else None  # finding them waits for the device
            if own is None:
                continue
            message = own.new_full((most,), -1, dtype=torch.int32)
            message[: own.numel()] = own
            gathered = message.new_empty(self._ranks * most)
            with self.stopwatch.span("exposed"), self.stopwatch.span("exchange"):
                self.exchange.all_gather(gathered, message, self._group, "return")
            with self.stopwatch.span("exposed"), self.stopwatch.span("decode"):
                for owner, positions in enumerate(gathered.view(self._ranks, most).long()):
                    slot.compressor.restore(owner, positions[positions >= 0])


def _check_dtypes(units: Sequence[tuple[str, FSDPModule]]) -> None:
    """FSDP2 casts a reduced gradient to its parameter's dtype at once, before a thread could have filled it."""
    for name, module in units:
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if parameter.dtype != torch.float32:
                raise UserError(
                    f"trainer.overlap=true needs float32 parameters to reduce in a thread, but unit {name} holds "
                    f"{parameter.dtype}; set trainer.overlap=false, or keep the parameters in float32 "
                    "(trainer.param_dtype may still be bfloat16)"
                )


def nonfinite_message(step: int, parameters: Sequence[str], ranks: Sequence[int]) -> str:
    """What to tell a user whose gradient is NaN or Inf at ``step`` (counted from 0; the message counts from 1)."""
    shown = ", ".join(parameters[:5]) + (f" and {len(parameters) - 5} more" if len(parameters) > 5 else "")
    return (
        f"step {step + 1}: the gradient of {shown} is NaN or Inf on rank {', '.join(map(str, ranks))}; "
        "this step updated nothing. Lower trainer.learning_rate, raise trainer.warmup_steps, set trainer.grad_clip, "
        "or look for bad data"
    )
