"""The end of a step's exchange: a few numbers of every rank in one small message, and what all ranks conclude from it.

They carry the metrics, the check for NaN, the return of values that could not be peeled, and the decision between
sketch and dense, so that all ranks decide alike without another collective.

Shape letters: R ranks, P parameters of all buckets, S slots, F numbers per slot (STATS).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.comm.buckets import Bucket, Slot
from tagc.comm.exchange import Exchange
from tagc.comm.step_metrics import STATS, Metrics, holds_residual
from tagc.comm.stopwatch import Stopwatch
from tagc.compressors import BucketStats
from tagc.errors import UserError


@dataclass
class StepReport:
    """What the ranks learned at the end of a step's exchange, the same on every rank."""

    loss: float  # mean over ranks of what :meth:`GradientSync.tell` was given; NaN without
    stop: bool = False  # a rank was asked to stop
    metrics: Metrics = field(default_factory=dict)
    layers: list[Metrics] = field(default_factory=list)  # every ``layers_every`` steps
    messages: list[str] = field(default_factory=list)


def gather_numbers(
    buckets: Sequence[Bucket],
    slots: Sequence[Slot],
    extra: dict[str, Tensor],
    exchange: Exchange,
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Every rank's numbers of this step: float64 [R, ...] by name, on the host (waits for the device).

    extra: 1-D tensors of the same sizes on every rank. Added: ``stats`` [S * F] and ``column_sums`` [P], of which a
    bucket that was not reduced in this step has zeros.
    """
    device = next(iter(extra.values())).device
    missing = torch.full((), math.nan, dtype=torch.float64, device=device)
    measured = [BucketStats() if slot.payload is None else slot.payload.stats for slot in slots]
    stats = [getattr(counts, name) for counts in measured for name in STATS]
    sums = [
        missing.new_zeros(len(bucket.parameters)) if bucket.column_sums is None else bucket.column_sums
        for bucket in buckets
    ]
    parts = {
        **extra,
        "stats": torch.stack([missing, *(missing if value is None else value for value in stats)])[1:],
        "column_sums": torch.cat([missing.new_zeros(0), *sums]),
    }
    own = torch.cat([part.to(torch.float64) for part in parts.values()])
    gathered = exchange.gather_numbers(own, group).cpu()
    split = gathered.split([part.numel() for part in parts.values()], dim=1)
    return dict(zip(parts, split, strict=True))


def check_finite(buckets: Sequence[Bucket], column_sums_RP: Tensor, step: int) -> None:
    """Errors: ``UserError`` naming step, parameters and ranks if a gradient is NaN or Inf on any rank."""
    bad_RP = ~column_sums_RP.isfinite()
    if not bad_RP.any():
        return
    names = [name for bucket in buckets for name, _ in bucket.parameters]
    # Backward spreads a NaN from the loss towards the input, so the last unit's parameters come first.
    bad = [names[i] for i in reversed(bad_RP.any(0).nonzero().flatten().tolist())]
    raise UserError(nonfinite_message(step, bad, bad_RP.any(1).nonzero().flatten().tolist()))


def check_residuals(slots: Sequence[Slot], residual_RS: Tensor, step: int) -> None:
    """Errors: ``UserError`` if a residual is not finite on any rank: gradient and old residual may overflow in sum.

    residual_RS: squared norms of the new residuals.
    """
    for slot, residual_R in zip(slots, residual_RS.unbind(1), strict=True):
        bad_R = ~residual_R.isfinite()
        if holds_residual(slot) and bad_R.any():
            names = [name for name, _ in slot.compressor.spec.parameters]
            raise UserError(nonfinite_message(step, names, bad_R.nonzero().flatten().tolist(), "residual"))


def nonfinite_message(step: int, parameters: Sequence[str], ranks: Sequence[int], what: str = "gradient") -> str:
    """What to tell a user whose gradient or residual is NaN or Inf at ``step`` (from 0; the message counts from 1)."""
    shown = ", ".join(parameters[:5]) + (f" and {len(parameters) - 5} more" if len(parameters) > 5 else "")
    return (
        f"step {step + 1}: the {what} of {shown} is NaN or Inf on rank {', '.join(map(str, ranks))}; "
        "this step updated nothing. Lower trainer.learning_rate, raise trainer.warmup_steps, set trainer.grad_clip, "
        "or look for bad data"
    )


def send_returns(
    slots: Sequence[Slot],
    unresolved_RS: Tensor,
    exchange: Exchange,
    stopwatch: Stopwatch,
    group: dist.ProcessGroup,
) -> None:
    """Tell the senders which values could not be peeled; they put them back into their residuals.

    All ranks know all counts, so in the usual step, with none, nothing is sent.
    """
    for slot, unresolved_R in zip(slots, unresolved_RS.unbind(1), strict=True):
        most = int(unresolved_R.nan_to_num().max())
        payload = slot.payload
        # Finding the positions waits for the device.
        own = slot.compressor.unresolved_positions(payload) if most and payload is not None else None
        if own is None or payload is None:
            continue
        ranks = group.size()
        message = own.new_full((most,), -1, dtype=torch.int32)
        message[: own.numel()] = own
        gathered = message.new_empty(ranks * most)
        with stopwatch.span("exposed"), stopwatch.span("exchange"):
            exchange.all_gather(gathered, message, group, "return")
        with stopwatch.span("exposed"), stopwatch.span("decode"):
            for owner, positions in enumerate(gathered.view(ranks, most).long()):
                slot.compressor.restore(payload, owner, positions[positions >= 0])
