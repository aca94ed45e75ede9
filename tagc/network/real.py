"""``network=real``: the machine's own interface, capped by its administrator (slurm/README.md) or not at all."""

from __future__ import annotations

import os

from tagc.errors import UserError
from tagc.network.counters import InterfaceCounters
from tagc.network.link import Counters, Link


class RealLink(Link):
    """Touches nothing. ``rate_bytes_per_s`` repeats what the user says the interface is capped to.

    Counts on the first interface of ``GLOO_SOCKET_IFNAME``. They are the whole interface's, so nothing is counted on
    the loopback, which all ranks of a machine share.
    """

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        super().__init__(rate_bytes_per_s)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        self._counters = InterfaceCounters(interface) if interface and not interface.startswith("lo") else None

    def set_rate(self, rate_bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """Errors: ``UserError``: this link is not ours to change."""
        raise UserError("network=real cannot change the rate of the machine's interface; set network.time_dilation=1")

    def read_counters(self) -> Counters | None:
        """See :meth:`Link.read_counters`."""
        return self._counters.read() if self._counters else None
