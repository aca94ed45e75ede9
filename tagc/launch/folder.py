"""The run folder as the launcher sees it: claimed before the run, read or completed after it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tagc.config import Config
from tagc.errors import UserError
from tagc.launch.failures import RankFailure
from tagc.launch.interrupts import RunInterrupted


class FolderInUse(UserError):
    """The run folder belongs to a run that is still going on."""


@contextlib.contextmanager
def claim_folder(run_dir: Path) -> Iterator[None]:
    """Create the run folder, check that it can be written, and lock it against a second run at the same time.

    Errors: :class:`FolderInUse`; ``UserError`` if it cannot be written.
    """
    from tagc.host.files import prepare_run_dir

    prepare_run_dir(run_dir)
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FolderInUse(
            f"the run folder {run_dir} is in use by another run; set hydra.run.dir to a new one"
        ) from None
    except OSError:
        pass  # some network file systems have no locks; the default folder names do not collide anyway
    try:
        yield
    finally:
        os.close(handle)


def read_outcome(run_dir: Path, stopped_by: int | None) -> dict[str, Any]:
    """The summary of a run whose ranks have ended without an error; ``stopped_by``: the signal that stopped them.

    Errors: :class:`RunInterrupted` if they stopped before the last step; :class:`RankFailure` without a summary.
    """
    from tagc.record import load_summary

    summary_path = run_dir / "summary.json"
    summary = load_summary(run_dir) if summary_path.exists() else {}
    status = summary.get("status")
    # After a stop during a restart the new ranks end at once, and the summary, if any, is the failed attempt's.
    if status == "interrupted" or (stopped_by and status != "done"):
        raise RunInterrupted(stopped_by or signal.SIGTERM)
    if not summary:
        raise RankFailure(f"all ranks ended without an error, but rank 0 wrote no {summary_path}")
    return summary | {"stop_signal": stopped_by} if stopped_by else summary


def write_failed_summary(run_dir: Path, status: str, error: str, config: Config) -> None:
    """Write a ``summary.json`` that says how the run ended, with the numbers of the steps it made.

    The error is the one that the launcher found; rank 0 may know only that it lost a connection.
    """
    from tagc.host.files import write_text_atomic
    from tagc.record import load_rows, summarise

    metrics = run_dir / "metrics.jsonl"
    numbers = summarise(load_rows(metrics) if metrics.exists() else [], config)
    summary = {**numbers, "status": status, "error": error}
    write_text_atomic(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
