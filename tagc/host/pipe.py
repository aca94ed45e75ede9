"""A command whose stdout is a pipe that its reader has closed: ``python run.py --help | head -3``.

A command's last lines: ``with closed_pipe_ends_quietly(): sys.exit(main())``.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

from tagc.errors import UserError
from tagc.host.utf8 import ensure_utf8

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


@contextlib.contextmanager
def closed_pipe_ends_quietly() -> Iterator[None]:
    """Run a command's ``main``; if the reader of stdout has closed its pipe, success becomes exit code 141.

    Neither this function nor the interpreter prints anything about it. A ``UserError`` becomes one line on stderr and
    exit code 1. Other exit codes and errors, also those of other pipes, stay what they are. Every command but run.py
    runs inside this, which also sets UTF-8.
    """
    ensure_utf8()
    try:
        yield
    except BrokenPipeError:
        if flush_stdout():
            raise
        sys.exit(CLOSED_PIPE)
    except UserError as error:
        flush_stdout()
        sys.exit(f"error: {error}")
    except SystemExit as end:
        if flush_stdout() or end.code not in (None, 0):
            raise
        sys.exit(CLOSED_PIPE)
    except BaseException:
        flush_stdout()
        raise
    if not flush_stdout():
        sys.exit(CLOSED_PIPE)


def _has_no_reader(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
