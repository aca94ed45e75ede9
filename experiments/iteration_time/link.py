"""From the plan's cap to a rate, given what this machine was just measured to need."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from experiments.iteration_time.plan import LinkSpec
from tagc.config import Config
from tagc.network.calibration import resolve_dilation
from tagc.network.link import WIRE_BYTES_PER_BYTE


@dataclass(frozen=True)
class Calibration:
    """What the uncapped steps of a cell showed."""

    compute_s: float  # CPU time of one rank and step
    baseline_bytes: int  # sent by a rank per step with ``fsdp``
    flops_per_step: float  # of one rank, on the machine that the link is scaled to


@dataclass(frozen=True)
class Rate:
    """The cap in force. Measured times divided by ``time_dilation`` are *scaled* times; 1 where nothing is scaled."""

    bytes_per_s: float | None  # per direction; None: no cap
    time_dilation: float = 1.0


def resolve_rate(spec: LinkSpec, measured: Calibration, config: Config) -> Rate:
    """The rate that ``spec`` means here.

    Example: 10 MB at 4 times a computation of 0.5 s are 5 MB/s, and 4.6 % more for headers.
    """
    if spec.comm_over_compute is not None:
        wire_bytes = measured.baseline_bytes * WIRE_BYTES_PER_BYTE
        return Rate(wire_bytes / (spec.comm_over_compute * measured.compute_s))
    if spec.rate_mbps is None:
        return Rate(None)
    dilation = 1.0
    if spec.gpu is not None:
        dilation = resolve_dilation(measured.compute_s, measured.flops_per_step, config)
    return Rate(spec.rate_mbps * 1e6 / 8 / dilation, dilation)


def describe_link(spec: LinkSpec, measured: Calibration, rate: Rate) -> dict[str, Any]:
    """Everything about the link under a name of its own, for the cell's record."""
    return {
        "nominal_mbps": spec.rate_mbps,
        "comm_over_compute": spec.comm_over_compute,
        "reference_gpu": spec.gpu,
        "measured": asdict(measured),
        "time_dilation": rate.time_dilation,
        "rate_mbps": None if rate.bytes_per_s is None else rate.bytes_per_s * 8 / 1e6,
    }
