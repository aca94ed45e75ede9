"""A command whose stdout is a pipe that its reader has closed: ``python run.py --help | head -3``."""

from __future__ import annotations

import os
import select
import sys

CLOSED_PIPE = 141  # what a shell reports of a command that SIGPIPE ended


def flush_stdout() -> bool:
    """Write out what is buffered; returns False if the reader has closed the pipe.

    Whatever is written later goes nowhere, so that the interpreter's own flush at exit does not fail.
    """
    try:
        sys.stdout.flush()
        is_closed = _has_no_reader(sys.stdout.fileno())
    except BrokenPipeError:
        is_closed = True
    except (OSError, ValueError):  # a full disk, or a stdout that is no file
        return True
    if is_closed:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    return not is_closed


def _has_no_reader(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
