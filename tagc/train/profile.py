"""A trace of a few steady steps on request (``trainer.profile``), and what it says about overlap.

Every rank writes ``profile/rank<r>.json.gz`` into the run folder, for Perfetto or Chrome. It holds the named ranges
encode, exchange, decode, gather and exposed, one range per bucket, and every operation of all threads; on CUDA the
kernels by stream too. A step with a fidelity diagnostic exchanges in line and so shows no overlap.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from tagc.config import TrainerConfig
from tagc.host.files import explain_write_errors

PROFILED_STEPS = 3
BACKWARD = "autograd::engine::evaluate_function"  # how autograd names its operations in a trace

logger = logging.getLogger("tagc")
Interval = tuple[float, float]


class StepProfiler:
    """Runs steps, and traces PROFILED_STEPS of them once ``trainer.timing_warmup_steps`` have run in this process.

    A run that ends or is stopped earlier gets a shorter trace from :meth:`close`.
    Errors: ``UserError`` when the run folder cannot be written.
    """

    def __init__(self, config: TrainerConfig, run_dir: Path, device: torch.device) -> None:
        self._folder, self._device = Path(run_dir) / "profile", device
        self._steps_to_wait = config.timing_warmup_steps if config.profile else None
        self._traced = 0
        self._profile: profile | None = None

    def run(self, train_step: Callable[[int], dict[str, Any]], step: int) -> dict[str, Any]:
        """``train_step(step)``; the row of a traced step carries ``profiled``, which keeps it out of the summary."""
        if self._steps_to_wait is None:
            return train_step(step)
        if self._steps_to_wait > 0:
            self._steps_to_wait -= 1
            return train_step(step)
        if self._profile is None:
            self._profile = self._start()
        row = train_step(step) | {"profiled": True}
        self._traced += 1
        if self._traced == PROFILED_STEPS:
            self.close()
        return row

    def close(self) -> None:
        """Write what has been traced, unless that is done. To be called on all ranks at once."""
        if self._steps_to_wait is None:
            return
        if self._profile is not None:
            self._write(self._profile)
        elif dist.get_rank() == 0:  # stopped early, or continued close to the end
            logger.warning("trainer.profile=true: the run ends before a step could be traced")
        self._profile = self._steps_to_wait = None

    def _start(self) -> profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes its start and stop to the console
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        # The thread that exchanges gradients was started before: by default only this thread would be seen.
        config = _ExperimentalConfig(profile_all_threads=True)
        result = profile(activities=activities, experimental_config=config)
        result.start()
        return result

    def _write(self, trace: profile) -> None:
        trace.stop()
        path = self._folder / f"rank{dist.get_rank()}.json.gz"
        with explain_write_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
        if dist.get_rank() == 0:
            logger.info("traces of %d step(s) are in %s%s", self._traced, path.parent, self._describe(path))
        dist.barrier()  # a rank that writes longer must not be waited for in the next step, which is timed

    def _describe(self, path: Path) -> str:
        if self._device.type == "cuda":
            return ""  # what the host did says nothing about the streams
        overlap = measure_overlap(load_events(path))
        return f"; {overlap.hidden_ms:.1f} of {overlap.exchange_ms:.1f} ms of exchange ran behind backward"


class Overlap(NamedTuple):
    """Wall time of the steps in a trace, in milliseconds."""

    exchange_ms: float  # gradients were on their way
    hidden_ms: float  # meanwhile backward computed on another thread, and did not wait


def load_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def measure_overlap(events: Iterable[dict[str, Any]]) -> Overlap:
    """How long gradients were exchanged in a CPU trace, and for how long of that backward went on computing.

    Time inside a range ``exposed`` is none of backward's: there its thread exchanges or waits.

    >>> def event(name, thread, begin, end):
    ...     return {"ph": "X", "name": name, "tid": thread, "ts": begin, "dur": end - begin}
    >>> mul = "autograd::engine::evaluate_function: MulBackward0"
    >>> measure_overlap([event("exchange", 2, 1e3, 5e3), event(mul, 1, 0e3, 4e3), event("exposed", 1, 3e3, 9e3)])
    Overlap(exchange_ms=4.0, hidden_ms=2.0)
    """
    spans = [event for event in events if event.get("ph") == "X"]

    def intervals(name: str) -> list[Interval]:
        return merge_intervals((e["ts"], e["ts"] + e["dur"]) for e in spans if e["name"].startswith(name))

    exchange, waiting = intervals("exchange"), intervals("exposed")
    behind = intersect_intervals(exchange, intervals(BACKWARD))
    hidden_us = _length(behind) - _length(intersect_intervals(behind, waiting))
    return Overlap(_length(exchange) / 1e3, hidden_us / 1e3)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order.

    >>> merge_intervals([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def intersect_intervals(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """What lies in both; each list is disjoint and in order.

    >>> intersect_intervals([(0, 3), (4, 6)], [(2, 5)])
    [(2, 3), (4, 5)]
    """
    result: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            result.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
