"""Logging of a rank: ``log.txt`` and the console on rank 0, warnings on stderr elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler

from tagc.host.files import explain_write_errors, prepare_run_dir

LOGGER_NAME = "tagc"
PIPE_WIDTH = 100  # columns of a table when the output is not a terminal
QUIET_VARIABLE = "TAGC_QUIET"  # set where something else shows how the runs go: rank 0 prints warnings only
_OWN = "_tagc_handler"  # marks handlers that setup_logging may take away again

_console: Console | None = None


def get_console() -> Console:
    """The one console of this process: progress bar and log handler share it, so that neither tears the other."""
    global _console
    if _console is None or (not _console.is_terminal and _console.file is not sys.stdout):
        console = Console()
        _console = console if console.is_terminal else Console(width=PIPE_WIDTH, soft_wrap=False)
    return _console


class _DropOnFailure(logging.Handler):
    """A failed write (full disk, reader of the pipe gone) costs no traceback; a file takes the line when it can."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a bad message is a fault in the program and stays loud
            super().handleError(record)


class _FileHandler(_DropOnFailure, logging.FileHandler):
    """``log.txt``."""


class _StreamHandler(_DropOnFailure, logging.StreamHandler):
    """Plain lines."""


def _hide_step_lines(record: logging.LogRecord) -> bool:
    # On a terminal the bar shows them; log.txt still gets them.
    return not getattr(record, "step_line", False)


def _root_prints() -> bool:
    """Whether the root logger writes to the console too (Hydra sets it up so), which would show every line twice."""
    streams = (getattr(handler, "stream", None) for handler in logging.getLogger().handlers)
    return any(stream in (sys.stdout, sys.stderr) for stream in streams if stream is not None)


def _rank_zero_handlers(run_dir: Path) -> list[logging.Handler]:
    with explain_write_errors(run_dir):
        file_handler = _FileHandler(run_dir / "log.txt", encoding="utf-8")
    file_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    console = get_console()
    if console.is_terminal:
        screen: logging.Handler = RichHandler(
            console=console, show_path=False, show_time=False, show_level=False, highlighter=NullHighlighter()
        )
        screen.addFilter(_hide_step_lines)
    else:
        screen = _StreamHandler(sys.stdout)
    screen.setFormatter(_PlainFormatter("%(message)s"))
    if os.environ.get(QUIET_VARIABLE):
        screen.setLevel(logging.WARNING)
    return [file_handler, screen]


class _PlainFormatter(logging.Formatter):
    """The bare message; from WARNING on the level comes first."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


def close_logging() -> None:
    """Take away and close what :func:`setup_logging` installed."""
    logger = logging.getLogger(LOGGER_NAME)
    for handler in [handler for handler in logger.handlers if getattr(handler, _OWN, False)]:
        logger.removeHandler(handler)
        with suppress(OSError):  # a full disk has been reported by then
            handler.close()
    logger.propagate = True


def setup_logging(run_dir: Path, rank: int) -> logging.Logger:
    """Install the handlers of logger ``tagc`` for this rank and return the logger. A second call replaces them.

    Rank 0: everything from INFO on to ``log.txt`` (with timestamps) and to stdout: through rich on a terminal, as plain
    lines in a pipe. Other ranks: warnings to stderr behind ``[rank N]``; they write no file.
    Errors: ``UserError`` when the run folder cannot be written.
    """
    close_logging()
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.INFO)
    if rank == 0:
        handlers = _rank_zero_handlers(prepare_run_dir(run_dir))
    else:
        handlers = [_StreamHandler(sys.stderr)]
        handlers[0].setLevel(logging.WARNING)
        handlers[0].setFormatter(_PlainFormatter(f"[rank {rank}] %(message)s"))
    for handler in handlers:
        setattr(handler, _OWN, True)
        logger.addHandler(handler)
    logger.propagate = not _root_prints()
    return logger
