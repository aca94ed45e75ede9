"""``network=namespaces``: every rank is a host of its own, with one capped interface, on one switch.

    rank 0's namespace          the switch's namespace                rank 1's namespace
    eth0 10.77.0.1  <-- veth -->  port0 -- bridge -- port1  <-- veth -->  eth0 10.77.0.2
    tbf caps sending              tbf caps receiving                      tbf caps sending

The namespaces have no names. The launcher's open files hold them, and ranks enter through ``/proc/<launcher>/fd``. When
launcher and ranks are gone, however they ended, the kernel removes everything: there is nothing that a killed run could
leave behind, nothing appears in the machine's own namespace, and runs at the same time use the same addresses.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

from tagc.errors import UserError
from tagc.network.counters import InterfaceCounters
from tagc.network.link import Counters, Link
from tagc.network.netns import call_inside, create_namespace, enter_namespace
from tagc.network.tbf import cap_interface

INTERFACE = "eth0"  # of every rank
ENVIRONMENT_KEY = "TAGC_NAMESPACES"  # <launcher's pid>:<switch's fd>,<rank 0's fd>,...; what ranks inherit
MAX_RANKS = 1000  # a Linux bridge has 1,024 ports
_TCP = Path("/proc/sys/net/ipv4")  # of the namespace that the calling thread is in
_MISSING = (errno.EOPNOTSUPP, errno.ENOENT, errno.ENOSYS)


class NamespacesUnavailable(UserError):
    """This machine or this user cannot have them."""


@contextlib.contextmanager
def open_hosts(ranks: int, rate_bytes_per_s: float | None) -> Iterator[dict[str, str]]:
    """Set up the switch and one host per rank; yields the environment that the ranks must inherit.

    Errors: :class:`NamespacesUnavailable` naming what is missing, :class:`UserError` for a rate out of reach.
    """
    if ranks > MAX_RANKS:
        raise NamespacesUnavailable(f"cluster.ranks={ranks}: a switch has {MAX_RANKS} ports; set network=paced")
    with contextlib.ExitStack() as stack:
        handles: list[int] = []
        with _explain("network namespaces (CONFIG_NET_NS)"):
            for _ in range(ranks + 1):
                handles.append(create_namespace())
                stack.callback(os.close, handles[-1])
        switch, *hosts = handles
        with _explain("a bridge (module bridge)"):
            call_inside(switch, lambda ip: ip.link("add", ifname="bridge", kind="bridge", state="up"))
        with _explain("veth pairs (module veth)"):
            call_inside(switch, lambda ip: _plug_in(ip, hosts))
        for rank, host in enumerate(hosts):
            with _explain("addresses (CONFIG_INET)"):
                call_inside(host, partial(_configure_host, rank))
            with _explain("the token bucket filter (module sch_tbf)"):
                _cap(host, switch, rank, rate_bytes_per_s)
        yield {ENVIRONMENT_KEY: f"{os.getpid()}:{','.join(map(str, handles))}", "GLOO_SOCKET_IFNAME": INTERFACE}


def _plug_in(ip: Any, hosts: list[int]) -> None:
    bridge = ip.link_lookup(ifname="bridge")[0]
    for rank, host in enumerate(hosts):
        ip.link("add", ifname=_port(rank), kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": host})
        ip.link("set", index=ip.link_lookup(ifname=_port(rank))[0], master=bridge, state="up")


def _configure_host(rank: int, ip: Any) -> None:
    ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
    interface = ip.link_lookup(ifname=INTERFACE)[0]
    ip.addr("add", index=interface, address=f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}", prefixlen=16)
    ip.link("set", index=interface, state="up")
    # The same on every machine; a namespace may always have reno. With BBR, some machines' default, a link of 50 Mbit/s
    # was idle for a tenth of a step: it probes for a shorter delay than a filled token bucket has.
    (_TCP / "tcp_congestion_control").write_text("reno")


def _port(rank: int) -> str:
    return f"port{rank}"


def _cap(host: int, switch: int, rank: int, rate_bytes_per_s: float | None) -> None:
    call_inside(host, lambda ip: cap_interface(ip, INTERFACE, rate_bytes_per_s))
    call_inside(switch, lambda ip: cap_interface(ip, _port(rank), rate_bytes_per_s))


@contextlib.contextmanager
def _explain(needs: str) -> Iterator[None]:
    """Turn what the kernel says into what the user lacks."""
    try:
        yield
    except Exception as error:
        code = getattr(error, "code", None) or getattr(error, "errno", None)  # pyroute2's, the system's
        remedy = "set network=paced, which needs neither rights nor modules"
        if code in (errno.EPERM, errno.EACCES):
            why = "it needs root, or the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN"
        elif code in _MISSING:
            why = f"this kernel lacks {needs}"
        elif isinstance(error, ImportError):
            why = "the package pyroute2 is not installed"
        elif isinstance(error, UserError):
            raise
        else:
            why = f"setting up {needs} failed: {error}"
        raise NamespacesUnavailable(f"network=namespaces cannot be used here: {why}; {remedy}") from error


class Host:
    """A rank's place in the network that :func:`open_hosts` set up; read from the environment it yielded.

    A context manager that closes its files; the namespaces stay as long as the launcher holds them.
    """

    def __init__(self, rank: int) -> None:
        launcher, handles = os.environ[ENVIRONMENT_KEY].split(":")
        switch, own = handles.split(",")[0], handles.split(",")[1 + rank]
        self.rank = rank
        self._outside = os.open(f"/proc/{launcher}/ns/net", os.O_RDONLY)
        self.switch, self.own = (os.open(f"/proc/{launcher}/fd/{fd}", os.O_RDONLY) for fd in (switch, own))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        for handle in (self._outside, self.switch, self.own):
            os.close(handle)

    def enter(self) -> None:
        """Move the calling thread into this host. Sockets that are open already stay where they were made."""
        enter_namespace(self.own)

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """The calling thread, and what it starts meanwhile, is on the machine's own network."""
        enter_namespace(self._outside)
        try:
            yield
        finally:
            enter_namespace(self.own)


class NamespaceLink(Link):
    """The interface of this rank's host; the kernel enforces the cap. There is no latency to set. Owns ``host``."""

    def __init__(self, host: Host, rate_bytes_per_s: float | None) -> None:
        super().__init__(rate_bytes_per_s)
        self._host = host
        self.set_rate(rate_bytes_per_s)  # a rank that was here before may have left another one
        self._counters = call_inside(host.own, lambda ip: InterfaceCounters(INTERFACE))

    def set_rate(self, rate_bytes_per_s: float | None, latency_s: float = 0.0) -> None:
        """See :meth:`Link.set_rate`. Both directions of this rank's link."""
        if latency_s:
            raise UserError("network.latency_ms works with network=paced only: this kernel path cannot add a delay")
        _cap(self._host.own, self._host.switch, self._host.rank, rate_bytes_per_s)
        super().set_rate(rate_bytes_per_s)

    def close(self) -> None:
        """Let go of the namespaces."""
        self._counters.close()
        self._host.__exit__()

    def read_counters(self) -> Counters:
        """See :meth:`Link.read_counters`. Frames that TCP hands over as one segment count one header together."""
        return self._counters.read()
