"""The paced link on a GPU: delays are queued on a CUDA stream, so the host never waits and overlap stays possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tagc.network.pacing import PacedLink

_CALIBRATION_CYCLES = 20_000_000


class StreamPacer:
    """One stream stands for the link: every exchange spins on it for the time its bytes need, one after another."""

    def __init__(self, link: PacedLink, device: torch.device) -> None:
        self._link = link
        self._stream = torch.cuda.Stream(device)
        self._cycles_per_s = self._measure_cycles_per_s()

    def _measure_cycles_per_s(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(_CALIBRATION_CYCLES)  # brings the clock up
            begin.record()
            torch.cuda._sleep(_CALIBRATION_CYCLES)
            end.record()
        end.synchronize()
        return _CALIBRATION_CYCLES / (begin.elapsed_time(end) / 1e3)

    @contextmanager
    def pace(self, nbytes: int) -> Iterator[None]:
        """The current stream goes on after the enclosed work, and after ``nbytes`` have passed the link and arrived."""
        current = torch.cuda.current_stream()
        if self._link.rate_bytes_per_s:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._spin(self._link.seconds_for(nbytes))
        yield
        current.wait_stream(self._stream)
        self._spin(self._link.latency_s)  # on the current stream: latency does not occupy the link

    def _spin(self, seconds: float) -> None:
        if seconds > 0:
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
