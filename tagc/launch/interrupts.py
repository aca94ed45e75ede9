"""Signals that reach the launcher: what they raise, and how they end the ranks.

While ranks run nothing is raised: torch elastic would be left half way through ending them. A signal is noted, and
the main thread, which does nothing else, ends the ranks (:func:`await_ranks`). At other times the first signal raises
and later ones are only noted, so that they cannot interrupt the clean-up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tagc.host.signals import SIGNALS, stop_file
from tagc.launch.rank_server import find_ranks

SHUTDOWN_S = 5.0  # ranks that ignore SIGTERM for this long are killed
_POLL_S = 0.1
_ABANDON_S = 10.0  # torch elastic is no longer waited for when it has had no living rank for this long
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command continues


class RunInterrupted(SystemExit):
    """The launcher got a signal and its ranks have ended.

    ``code`` is 75 if they left a checkpoint that the same command continues, else 128 + the signal, as shells count.
    """

    def __init__(self, signum: int, run_dir: Path | None = None) -> None:
        self.signal = signal.Signals(signum)
        self.can_continue = False
        if run_dir is not None and self.signal != signal.SIGINT:
            from tagc.train.checkpoint_files import list_checkpoints

            self.can_continue = bool(list_checkpoints(run_dir))
        super().__init__(REQUEUE_EXIT_CODE if self.can_continue else 128 + signum)


@dataclass
class Inbox:
    """The signals that this process received since its handlers were set."""

    received: list[int] = field(default_factory=list)  # in order
    raises: bool = True  # the next one
    is_last: bool = False  # the process ends with this block; see :meth:`ignore_until_exit`

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        self.received.append(signum)
        if self.raises:
            self.raises = False
            raise _as_exception(signum)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Within the block nothing is raised. Raises at once if a signal was received before."""
        self.raises = False
        self.check()
        try:
            yield
        finally:
            self.raises = not self.received

    def ignore_until_exit(self) -> None:
        """After an interruption, leave the signals ignored: one at the interpreter's end would change the exit code."""
        self.is_last = bool(self.received)

    def check(self) -> None:
        """Raise what the first signal stands for, also if it was raised before where exceptions are swallowed."""
        if self.received:
            raise _as_exception(self.received[0])


_active: Inbox | None = None  # of the outermost handle_signals


def _as_exception(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else RunInterrupted(signum)


@contextlib.contextmanager
def handle_signals() -> Iterator[Inbox]:
    """Set the handlers of SIGINT, SIGHUP, SIGTERM and SIGUSR1; within the block of a caller that did, join it.

    The command line calls it around a whole run or sweep, clean-up included; :func:`tagc.launch.launch` for callers
    that do not. Signals that were ignored (``nohup``) stay ignored. To be called in the main thread.
    """
    global _active
    if _active is not None:
        yield _active
        return
    inbox = Inbox()
    saved = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, *SIGNALS)}
    saved = {number: handler for number, handler in saved.items() if handler is not signal.SIG_IGN}
    _active = inbox
    try:
        for number in saved:
            signal.signal(number, inbox.receive)
        yield inbox
    finally:
        _active = None
        for number, handler in saved.items():
            signal.signal(number, signal.SIG_IGN if inbox.is_last else handler)


def await_ranks(elastic: threading.Thread, inbox: Inbox, report_dir: str, grace_s: float) -> int | None:
    """Wait until ``elastic``, the thread that starts and joins the ranks, ends; returns the signal that ended it.

    SIGTERM and SIGUSR1 give the ranks ``grace_s`` seconds to save and end; repeating them changes nothing, because
    SLURM sends both. SIGINT and SIGHUP, or the end of that time, send the ranks SIGTERM and kill them after
    :data:`SHUTDOWN_S`. A signal after that, or SIGINT and SIGHUP after any other, kills the ranks at once.
    """
    done, phase, deadline_s = 0, "running", float("inf")
    while elastic.is_alive():
        elastic.join(_POLL_S)
        before = phase
        for signum in inbox.received[done:]:
            done += 1
            if signum in SIGNALS and phase in ("running", "saving"):
                phase = "saving"
            else:
                phase = "ending" if phase == "running" else "killing"
        if phase == before and time.monotonic() > deadline_s:
            phase = "ending" if phase == "saving" else "killing"
        if phase != before:
            deadline_s = time.monotonic() + (grace_s if phase == "saving" else SHUTDOWN_S)
            Path(stop_file(report_dir)).touch()
            if (before, phase) == ("running", "killing"):  # two signals between two looks
                _announce("ending")
            _announce(phase)
            if phase == "ending":
                _send(signal.SIGTERM, elastic)
        if phase == "killing":
            if _send(signal.SIGKILL, elastic):  # elastic may start them again before it gives up
                deadline_s = time.monotonic() + _ABANDON_S
            elif time.monotonic() > deadline_s + _ABANDON_S:
                break
    return inbox.received[0] if inbox.received else None


def _announce(phase: str) -> None:
    """One line on stderr, past Python's buffers, which the interrupted code may hold."""
    texts = {
        "saving": "ending the ranks after their step and a checkpoint; Ctrl-C kills them at once\n",
        "ending": "ending the ranks; a further signal kills them at once\n",
        "killing": "killing the ranks\n",
    }
    with contextlib.suppress(OSError):
        os.write(2, texts[phase].encode())


def _send(signum: int, elastic: threading.Thread) -> list[int]:
    """Send a signal to the processes that ``elastic`` started; returns those that live."""
    try:
        pids = find_ranks(elastic.native_id)
    except OSError:  # a rank, or the thread, has just ended; or this is not Linux
        pids = [process.pid for process in multiprocessing.active_children() if process.pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return pids
