"""The scale of the link: how much slower this machine computes than a reference GPU, and a link slowed down alike.

    time_dilation = compute seconds per step here / (FLOPs per step and rank / (peak FLOP/s x utilisation))

With the link's rate divided by it and the latency multiplied, a CPU's run has the ratio of communication to computation
that the reference GPU has on the link as configured (time-warped network emulation: Gupta et al., "To Infinity and
Beyond", NSDI '06). ``auto`` measures the dilation during the run's own first steps, whose link is not capped: nothing
is computed twice, and training is bitwise the same. A measured time divided by the dilation is a *scaled* time.

What it does not know: on a model as small as nano a real GPU stays far below the utilisation assumed here (it waits for
kernel launches), so the dilation, and with it the weight of communication, is on the high side. FLOPs are the model's
(:func:`tagc.model.gpt.flops_per_token`): what activation checkpointing computes again counts as time here only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tagc.config import Config
from tagc.host.device import count_cores
from tagc.network.link import Link, format_rate
from tagc.network.select import dilate

logger = logging.getLogger("tagc")

CALIBRATION_STEPS = 4  # the first is left out: it allocates memory and compiles kernels
#: Share of the peak that training reaches. Llama 3 (arXiv 2407.21783, section 3.3.2) reports 38-43 % in bf16 on H100,
#: PaLM (arXiv 2204.02311, table 3) 46 % on TPU v4.
UTILISATION = 0.4


@dataclass(frozen=True)
class ReferenceGpu:
    """Dense peak FLOP/s of the tensor cores, sums in fp32. float32 runs as TF32, as this project sets it on CUDA."""

    tf32: float
    bfloat16: float
    source: str


REFERENCE_GPUS = {
    "rtx3080": ReferenceGpu(29.8e12, 59.5e12, "NVIDIA Ampere GA102 GPU Architecture, whitepaper V2, table 2"),
    "a100": ReferenceGpu(156e12, 312e12, "NVIDIA A100 Tensor Core GPU, data sheet (SXM)"),
    "h100": ReferenceGpu(494.7e12, 989.4e12, "NVIDIA H100 Tensor Core GPU Architecture, whitepaper, table 3 (SXM5)"),
}


def reference_compute_s(flops_per_step: float, config: Config) -> float:
    """Seconds that ``network.reference_gpu`` needs for ``flops_per_step``, in the parameters' dtype."""
    gpu = REFERENCE_GPUS[config.network.reference_gpu]
    peak = gpu.bfloat16 if config.trainer.param_dtype == "bfloat16" else gpu.tf32
    return flops_per_step / (peak * UTILISATION)


def resolve_dilation(compute_s: float, flops_per_step: float, config: Config) -> float:
    """How much longer a step's computation takes here than on the reference GPU, at least 1.

    compute_s: seconds that one rank computes per step. flops_per_step: of one rank. Arms of one experiment that must
    share a link measure once, call this once, and pass the result as ``network.time_dilation``.
    """
    return max(1.0, compute_s / reference_compute_s(flops_per_step, config))


def oversubscription(threads_per_rank: int) -> float:
    """How often the ranks on this machine, with ``threads_per_rank`` threads each, share a core: at least 1."""
    return max(1.0, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * threads_per_rank / count_cores())


class LinkScale:
    """The time dilation that is in force on this rank's link; measured first where the configuration says ``auto``.

    link: from :func:`tagc.network.build_link`. flops_per_step: of this rank. agree: turns this rank's number into the
    largest over all ranks (one tiny collective).
    ``dilation`` is None until it is known; the link is not capped until then. ``measured`` is what ``auto`` found, in
    this run or in the one that it continues.
    """

    def __init__(
        self, config: Config, link: Link, flops_per_step: float, device_type: str, agree: Callable[[float], float]
    ) -> None:
        self._config, self._link, self._flops, self._agree = config, link, flops_per_step, agree
        self.dilation: float | None = None
        self.measured: float | None = None
        self._samples_s: list[float] = []
        wanted = config.network.time_dilation
        has_link = config.bandwidth.rate_mbps is not None or config.network.latency_ms > 0
        if not isinstance(wanted, str):
            self.dilation = float(wanted)  # the link was built with it
        elif device_type == "cuda" or not has_link or config.cluster.ranks == 1:
            self._set_dilation(1.0)

    def take_over(self, measured: float | None) -> None:
        """Go on with what an earlier part of this run measured, if it did and ``auto`` still asks for it."""
        if measured is not None and self.dilation is None:
            self.measured = measured
            self._set_dilation(measured)

    def _set_dilation(self, dilation: float) -> None:
        self.dilation = dilation
        self._link.set_rate(*dilate(self._config.bandwidth, self._config.network, dilation))

    def describe(self) -> str:
        """For the line that says what runs, behind the link's nominal rate."""
        if self.dilation is None:
            return ", capped once the first steps have measured this machine"
        return f" / {self.dilation:.4g}" if self.dilation != 1 else ""

    def close_step(self, row: dict[str, Any], steps_left: int) -> dict[str, float | None]:
        """The scale's columns for a step that has just ended; the last step of the calibration sets the link.

        row: the step's ``iteration_ms`` (and, while calibrating, ``compute_cpu_ms`` and ``wire_bytes``). The columns of
        a step on the link before it was capped are None: its time belongs to no statistic. steps_left: of the run.
        Errors: ``UserError`` on all ranks for a rate that the link cannot enforce.
        """
        if self.dilation is not None:
            return {"time_dilation": self.dilation, "scaled_iteration_ms": row["iteration_ms"] / self.dilation}
        self._samples_s.append(row["compute_cpu_ms"] / 1e3)
        # With few steps left it measures fewer, so that the last one still feels the cap.
        if len(self._samples_s) == CALIBRATION_STEPS or steps_left <= 1:
            self._finish(row["wire_bytes"], steps_left)
        return {"time_dilation": None, "scaled_iteration_ms": None}

    def _finish(self, wire_bytes: int, steps_left: int) -> None:
        # What else runs on the machine only lengthens a step, its CPU time too (caches): the shortest is nearest.
        compute_s = self._agree(min(self._samples_s[1:] or self._samples_s))
        self.measured = resolve_dilation(compute_s, self._flops, self._config)
        self._set_dilation(self.measured)
        for line in self._explain(compute_s, wire_bytes, steps_left):
            logger.info("%s", line)

    def _explain(self, compute_s: float, wire_bytes: int, steps_left: int) -> list[str]:
        name, rate = self._config.network.reference_gpu, self._link.rate_bytes_per_s
        reference_ms = reference_compute_s(self._flops, self._config) * 1e3
        lines = [
            f"time dilation {self.dilation:.4g}: a step computes for {compute_s * 1e3:.3g} ms here, for "
            f"{reference_ms:.3g} ms on {name} ({UTILISATION:.0%} of its peak)"
        ]
        if rate is not None and steps_left:
            wire_s = self._link.seconds_for(wire_bytes)
            lines.append(
                f"from here on the link runs at {format_rate(rate * 8e-6)}: the {wire_bytes / 1e6:.3g} MB of a step "
                f"take {wire_s:.3g} s, those of all {steps_left} steps left {steps_left * wire_s / 60:.2g} min"
            )
        if steps_left == 0:
            lines.append("no step is left to feel the link: raise trainer.max_steps, or set network.time_dilation=1")
        elif len(self._samples_s) == 1:
            lines.append("the dilation is too high: the first step also allocates memory; raise trainer.max_steps")
        return lines
