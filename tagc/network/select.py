"""Which network a run uses: chosen once by the launcher, then entered by every rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from tagc.config import BandwidthConfig, Config, NetworkConfig
from tagc.errors import UserError
from tagc.network.link import Link
from tagc.network.namespaces import Host, NamespaceLink, open_hosts
from tagc.network.pacing import PacedLink
from tagc.network.real import RealLink

logger = logging.getLogger("tagc")


def dilate(bandwidth: BandwidthConfig, network: NetworkConfig, time_dilation: float) -> tuple[float | None, float]:
    """The arguments of :meth:`Link.set_rate`: rate in bytes per second (None: no cap) and latency in seconds.

    ``time_dilation`` divides the rate and multiplies the latency.
    """
    rate = None if bandwidth.rate_mbps is None else bandwidth.rate_mbps * 1e6 / 8 / time_dilation
    return rate, network.latency_ms / 1e3 * time_dilation


@contextlib.contextmanager
def open_network(config: Config, device: str) -> Iterator[tuple[Config, dict[str, str]]]:
    """In the launcher: set up what ``network`` asks for, as long as the context lasts.

    Yields the configuration with ``auto`` resolved, and the environment variables that the ranks must inherit.
    Errors: ``UserError`` that says why namespaces cannot be had.
    """
    with contextlib.ExitStack() as stack:
        name, environment = config.network.name, {}
        if name in ("namespaces", "auto"):
            try:
                environment = stack.enter_context(_open_namespaces(config, device))
                name = "namespaces"
            except UserError as obstacle:
                if name == "namespaces":
                    raise
                name = "paced"
                logger.info("network=auto: paced, because %s", obstacle)
            else:
                if config.network.name == "auto":
                    logger.info("network=auto: namespaces")
        yield replace(config, network=replace(config.network, name=name)), environment


def _open_namespaces(config: Config, device: str) -> AbstractContextManager[dict[str, str]]:
    if config.cluster.nodes > 1:
        raise UserError("namespaces join ranks of one machine")
    if device == "cuda":
        raise UserError(
            "network=namespaces caps sockets, but GPUs of one machine talk over NVLink, PCIe or shared memory; "
            "set network=paced"
        )
    if config.network.latency_ms:
        raise UserError(
            f"network.latency_ms={config.network.latency_ms:g} needs network=paced: namespaces cap the rate only"
        )
    return open_hosts(config.cluster.ranks, _initial_rate(config.bandwidth, config.network)[0])


def _initial_rate(bandwidth: BandwidthConfig, network: NetworkConfig) -> tuple[float | None, float]:
    dilation = network.time_dilation
    return (None, 0.0) if isinstance(dilation, str) else dilate(bandwidth, network, dilation)


def enter_network(network: NetworkConfig, rank: int) -> None:
    """Put the calling thread on the rank's own network, if it has one: sockets made from now on belong there."""
    if network.name == "namespaces":
        with Host(rank) as host:
            host.enter()


@contextlib.contextmanager
def leave_network(network: NetworkConfig, rank: int) -> Iterator[None]:
    """What starts within this context is on the machine's network: threads and processes that talk to the world."""
    if network.name != "namespaces":
        yield
        return
    with Host(rank) as host, host.outside():
        yield


def build_link(bandwidth: BandwidthConfig, network: NetworkConfig, rank: int = 0) -> Link:
    """The link that the configuration describes, slowed down by ``network.time_dilation``; not capped with ``auto``.

    :class:`tagc.network.calibration.LinkScale` caps it once the dilation is known.
    """
    rate, latency_s = _initial_rate(bandwidth, network)
    if network.name == "namespaces":
        return NamespaceLink(Host(rank), rate)
    if network.name == "real":
        return RealLink(rate)
    return PacedLink(rate, latency_s)
