"""The kernel's token bucket filter (``tc-tbf(8)``): holds what an interface sends to a rate."""

from __future__ import annotations

import errno
from typing import Any

from tagc.errors import UserError

MIN_RATE, MAX_RATE = (
    12_500.0,
    2.0**32 - 1,
)  # bytes per second: a full frame in 0.12 s; the field in the kernel's message
BURST_S = 2e-3  # the credit that an idle link saves up, as time at the full rate
MIN_BURST_BYTES = 4_096  # holds a full frame, else nothing passes
QUEUE_BYTES = 4 << 20  # what waits for its turn before frames are dropped
MAX_SEGMENT_BYTES = 65_536  # the kernel's default: what TCP hands to an interface at once, to be cut into frames there


def cap_interface(ip: Any, interface: str, rate_bytes_per_s: float | None) -> None:
    """Cap what ``interface`` sends; None takes the cap away. ``ip``: an ``IPRoute`` of the interface's namespace.

    Errors: ``UserError`` for a rate that the filter cannot hold.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    index = ip.link_lookup(ifname=interface)[0]
    if rate_bytes_per_s is None:
        try:
            ip.tc("del", index=index, handle=0, parent=0xFFFFFFFF)
        except NetlinkError as error:
            if error.code not in (errno.ENOENT, errno.EINVAL):
                raise
        ip.link("set", index=index, gso_max_size=MAX_SEGMENT_BYTES)
        return
    check_rate(rate_bytes_per_s)
    burst = max(MIN_BURST_BYTES, int(rate_bytes_per_s * BURST_S))
    ip.tc("replace", "tbf", index, handle="1:", rate=int(rate_bytes_per_s), burst=burst, limit=burst + QUEUE_BYTES)
    # A segment that does not fit the bucket is cut into single frames by the processor: 2 to 5 times its time.
    ip.link("set", index=index, gso_max_size=min(MAX_SEGMENT_BYTES, max(MIN_BURST_BYTES, burst // 2)))


def check_rate(rate_bytes_per_s: float | None) -> None:
    """Errors: ``UserError`` for a rate that the filter cannot hold."""
    if rate_bytes_per_s is not None and not MIN_RATE <= rate_bytes_per_s <= MAX_RATE:
        raise UserError(
            f"network=namespaces cannot cap a link at {rate_bytes_per_s * 8e-6:g} Mbit/s (bandwidth.rate_mbps / "
            f"network.time_dilation); legal: {MIN_RATE * 8e-6:g} to {MAX_RATE * 8e-6:,.0f} Mbit/s, or network=paced"
        )
