"""What a rank knows about its network interface, however the cap on it is enforced."""

from __future__ import annotations

from typing import NamedTuple

# An Ethernet frame of 1,514 bytes carries 1,448: the rest are the headers of Ethernet, IPv4 and TCP with timestamps.
WIRE_BYTES_PER_BYTE = 1514 / 1448


def format_rate(mbps: float) -> str:
    """For people: ``57.12 Mbit/s``, ``25,000 Mbit/s``."""
    return f"{mbps:,.0f} Mbit/s" if mbps >= 1000 else f"{mbps:.4g} Mbit/s"


class Counters(NamedTuple):
    """Bytes that an interface has sent and received since it came up, headers included."""

    sent_bytes: int
    received_bytes: int


class Link:
    """One rank's interface.

    ``rate_bytes_per_s``: the cap in each direction on all bytes, headers too, None for none; ``latency_s``: one way.
    This class leaves traffic alone: bytes move as fast as the machine lets them, and nothing is counted.
    """

    def __init__(self, rate_bytes_per_s: float | None = None, latency_s: float = 0.0) -> None:
        self.rate_bytes_per_s, self.latency_s = rate_bytes_per_s, latency_s

    def set_rate(self, rate_bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """Change the cap while ranks run; bytes that are under way keep the old one. Every rank sets its own link.

        Errors: ``UserError`` for a cap that this link cannot enforce.
        """
        self.rate_bytes_per_s, self.latency_s = rate_bytes_per_s, latency_s

    def seconds_for(self, nbytes: int) -> float:
        """How long ``nbytes`` of payload occupy one direction of the link: 0 without a cap."""
        return nbytes * WIRE_BYTES_PER_BYTE / self.rate_bytes_per_s if self.rate_bytes_per_s else 0.0

    def read_counters(self) -> Counters | None:
        """The interface's counters now; None where the link has no interface of its own."""
        return None
