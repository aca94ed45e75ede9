"""SIGTERM and SIGUSR1: the ranks finish their step, save and end, in place of being ended.

The launcher turns the signal into a file whose name the ranks know from the environment; a rank that gets the signal
itself needs no file. At the end of a step all ranks hear of it, so they stop at the same one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what SLURM and people send; SLURM's early warning (--signal=USR1@90)
RESTART_VARIABLE = "TAGC_RESTART"  # what a restarted rank shall say about it
STOP_FILE_VARIABLE = "TAGC_STOP_FILE"
ENDED_FILE_VARIABLE = (
    "TAGC_ENDED_FILE"  # what a rank writes when it is sent SIGTERM, so that it is not taken for the cause
)
_LONE_SIGTERM_S = 3.0  # a rank whose launcher goes on was sent SIGTERM because another one failed


@contextlib.contextmanager
def block_signals(*signals: signal.Signals) -> Iterator[None]:
    """Hold signals back from this thread, and for good from the processes that it starts meanwhile: they inherit it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stop_file(report_dir: str) -> str:
    """The file that asks ranks to stop."""
    return str(Path(report_dir, "stop"))


@contextlib.contextmanager
def listen_in_rank() -> Iterator[Callable[[], bool]]:
    """In a rank's main thread: yields the question whether this rank was asked to stop."""
    name = os.environ.get(STOP_FILE_VARIABLE)
    file = Path(name) if name else None
    received: list[int] = []
    answered = threading.Event()

    def is_requested() -> bool:
        requested = bool(received) or (file is not None and file.exists())
        if requested:
            answered.set()
        return requested

    def end_unless_all_stop(read_end: int) -> None:
        # A thread, woken by the interpreter's C handler: a Python handler waits until the main thread comes back to
        # Python, and that may be stuck in a collective whose other end is gone.
        with open(read_end, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] == signal.SIGTERM and (ended := os.environ.get(ENDED_FILE_VARIABLE)):
                    with contextlib.suppress(OSError):
                        Path(ended).touch()
                is_alone = number[0] == signal.SIGTERM and not answered.wait(_LONE_SIGTERM_S)
                if is_alone and (file is None or not file.exists()):
                    os._exit(128 + signal.SIGTERM)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    threading.Thread(target=end_unless_all_stop, args=(read_end,), name="stop-request", daemon=True).start()
    saved = {number: signal.signal(number, lambda signum, frame: received.append(signum)) for number in SIGNALS}
    saved_wakeup = signal.set_wakeup_fd(write_end)
    try:
        yield is_requested
    finally:
        answered.set()
        signal.set_wakeup_fd(saved_wakeup)
        os.close(write_end)
        for number, handler in saved.items():
            signal.signal(number, handler)
