"""Resident memory of this process, from the kernel."""

from __future__ import annotations

import ctypes
import gc
import re
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The most that resident memory rose over its level at construction. Linux; elsewhere :meth:`read` gives None."""

    def __init__(self) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator kept would hide a part of the rise
            _CLEAR.write_text("5")  # proc(5): resets the peak to the present level
        self._begin = _read_kilobytes("VmRSS")

    def read(self) -> int | None:
        """Bytes above the level at construction, at the peak."""
        peak = _read_kilobytes("VmHWM")
        return None if peak is None or self._begin is None else (peak - self._begin) * 1024


def _read_kilobytes(key: str) -> int | None:
    try:
        match = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
