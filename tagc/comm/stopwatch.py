"""Where an iteration's time goes: named spans, on the clock of the device that does the work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class Stopwatch:
    """Adds up milliseconds by name. On CUDA spans are event pairs on the current stream, read when taken.

    On the CPU every span also adds the CPU time of its thread under ``<name>_cpu``: unlike wall time that does not grow
    with what else runs on the machine, or in the other threads of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._total_ms: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the enclosed block under ``name``, which is also its name in a profiler's trace."""
        with record_function(name):
            if self._cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                yield
                end.record()
                self._events.append((name, begin, end))
            else:
                begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
                try:
                    yield
                finally:
                    self._total_ms[name] += (time.perf_counter() - begin_s) * 1e3
                    self._total_ms[f"{name}_cpu"] += (time.thread_time() - begin_cpu_s) * 1e3

    def take(self) -> dict[str, float]:
        """Milliseconds by name since the last call, then start again. On CUDA this waits for the events."""
        for name, begin, end in self._events:
            end.synchronize()
            self._total_ms[name] += begin.elapsed_time(end)
        result = dict(self._total_ms)
        self._total_ms.clear()
        self._events.clear()
        return result
