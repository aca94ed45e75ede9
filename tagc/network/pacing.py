"""``network=paced``: each rank's full-duplex link modelled in process.

Every byte a rank sends or receives reserves time on its link at the configured rate; an exchange may not complete
before the time it reserved has passed. Concurrent exchanges queue behind each other, so together they never exceed the
rate. Works without privileges. Protocol overhead is a constant factor. Not modelled: congestion inside a switch, loss,
and the processor time that a real network stack takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tagc.network.link import Link


class PacedLink(Link):
    """A link whose user waits: :meth:`reserve` time for what is sent or received, :meth:`wait_until` it is over."""

    def __init__(
        self,
        rate_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(rate_bytes_per_s, latency_s)
        self._clock, self._sleep = clock, sleep
        self._free_at = {"send": 0.0, "receive": 0.0}
        self._lock = threading.Lock()

    @property
    def is_capped(self) -> bool:
        """Whether this link delays anything."""
        return self.rate_bytes_per_s is not None or self.latency_s > 0

    def reserve(self, direction: str, nbytes: int) -> float:
        """Queue ``nbytes`` on the link; returns the clock time at which the last of them has passed it."""
        with self._lock:
            free_at = max(self._clock(), self._free_at[direction]) + self.seconds_for(nbytes)
            self._free_at[direction] = free_at
        return free_at + self.latency_s

    def wait_until(self, deadline: float) -> None:
        """Block until the clock reaches ``deadline``."""
        remaining = deadline - self._clock()
        if remaining > 0:
            self._sleep(remaining)
