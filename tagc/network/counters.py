"""What the kernel counted on an interface."""

from __future__ import annotations

from tagc.network.link import Counters

_RECEIVED, _SENT = 0, 8  # columns of /proc/net/dev behind the interface's name, proc(5)


class InterfaceCounters:
    """Reads one interface of the namespace that the creating thread was in, from any thread.

    The open file stays with that namespace, and is open as long as the link.

    Errors: ``ValueError`` for an interface that does not exist.
    """

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self._file = open("/proc/thread-self/net/dev", encoding="ascii")  # noqa: SIM115
        self.read()

    def close(self) -> None:
        self._file.close()

    def read(self) -> Counters:
        """The counters now."""
        self._file.seek(0)
        for line in self._file:
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                columns = numbers.split()
                return Counters(int(columns[_SENT]), int(columns[_RECEIVED]))
        raise ValueError(f"there is no network interface {self.interface}")
