"""From the configuration to a rank's link."""

from __future__ import annotations

from tagc.config import BandwidthConfig, NetworkConfig
from tagc.network.link import Link
from tagc.network.pacing import PacedLink


def dilate(bandwidth: BandwidthConfig, network: NetworkConfig, time_dilation: float) -> tuple[float | None, float]:
    """The arguments of :meth:`Link.set_rate`: rate in bytes per second (None: no cap) and latency in seconds.

    ``time_dilation`` divides the rate and multiplies the latency.
    """
    rate = None if bandwidth.rate_mbps is None else bandwidth.rate_mbps * 1e6 / 8 / time_dilation
    return rate, network.latency_ms / 1e3 * time_dilation


def build_link(bandwidth: BandwidthConfig, network: NetworkConfig) -> Link:
    """The link that the configuration describes, slowed down by ``network.time_dilation``; not capped with ``auto``.

    :class:`tagc.network.calibration.LinkScale` caps it once the dilation is known.
    """
    dilation = network.time_dilation
    return PacedLink() if isinstance(dilation, str) else PacedLink(*dilate(bandwidth, network, dilation))
