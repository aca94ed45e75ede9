"""Linux network namespaces without names: each lives as long as somebody holds its file descriptor or runs in it.

A namespace belongs to a thread, so whatever concerns another namespace is done in a thread of its own that ends there.
Python has ``os.setns`` and ``os.unshare`` from 3.12 on.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_OWN = "/proc/thread-self/ns/net"
T = TypeVar("T")


def open_own_namespace() -> int:
    """A file descriptor of the calling thread's namespace; not inherited by child processes."""
    return os.open(_OWN, os.O_RDONLY)


def create_namespace() -> int:
    """A new namespace that exists until the returned file descriptor is closed. Errors: ``OSError`` without rights."""

    def create() -> int:
        _call("unshare", _CLONE_NEWNET)
        return open_own_namespace()

    return _run_in_thread(create)


def enter_namespace(handle: int) -> None:
    """Move the calling thread, and the threads and processes it starts from now on, into a namespace."""
    _call("setns", handle, _CLONE_NEWNET)


def call_inside(handle: int, function: Callable[[Any], T]) -> T:
    """``function(ip)`` with an ``IPRoute`` of the namespace; the caller stays where it is."""
    from pyroute2 import IPRoute  # slow to import, and only for those who use namespaces

    def call() -> T:
        enter_namespace(handle)
        with IPRoute() as ip:
            return function(ip)

    return _run_in_thread(call)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _run_in_thread(function: Callable[[], T]) -> T:
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
