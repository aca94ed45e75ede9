"""The run folder as the launcher sees it: claimed before the run, read or completed after it."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tagc.config import Config
from tagc.host.run_lock import FolderInUse, hold_folder
from tagc.launch.failures import RankFailure
from tagc.launch.interrupts import RunInterrupted

__all__ = ["FolderInUse", "claim_folder", "read_outcome", "write_failed_summary"]


@contextlib.contextmanager
def claim_folder(run_dir: Path) -> Iterator[None]:
    """Create the run folder, check that it can be written, and lock it against a second run at the same time.

    Errors: :class:`FolderInUse`; ``UserError`` if it cannot be written.
    """
    with hold_folder(run_dir):
        yield


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
    from tagc.record import summarise
    from tagc.record.rows import salvage_rows

    numbers = summarise(salvage_rows(run_dir / "metrics.jsonl"), config)
    summary = {**numbers, "status": status, "error": error}
    write_text_atomic(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
