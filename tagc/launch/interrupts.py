"""Signals in the launcher."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tagc.host.signals import SIGNALS, block_signals

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


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A handler that raises."""
    raise RunInterrupted(signum)


def signals_to_handle(*signals: signal.Signals) -> list[signal.Signals]:
    """Those that the caller did not ask to be ignored (``nohup``)."""
    return [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Turn signals into exceptions, and restore the handlers afterwards (elastic leaves its own behind)."""
    saved = {number: signal.getsignal(number) for number in signals_to_handle(*SIGNALS, signal.SIGHUP)}
    for number in saved:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def keep_sigint_from_ranks() -> Iterator[None]:
    """Let Ctrl-C reach the launcher only; it ends the ranks, which would else print one traceback each.

    A terminal sends SIGINT to all processes in the foreground, also to ranks that are still importing. They inherit
    the signal mask of the thread that starts them, so that thread blocks SIGINT and a helper thread receives it;
    Python still raises ``KeyboardInterrupt`` in the main thread.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, name="sigint", daemon=True).start()
    try:
        with block_signals(signal.SIGINT):
            yield
    finally:
        done.set()
