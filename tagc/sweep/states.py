"""What a point's folder says about it. Nothing else remembers a sweep.

``summary.json`` says how a run ended. ``job.json`` says who ran it, with which code: it has no ``ended_at`` if that was
killed. Whether somebody runs it now is said by the folder's lock alone (tagc/host/run_lock.py).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from tagc.host.files import write_text_atomic
from tagc.host.run_lock import describe_holder, find_holder, hold_folder, is_held_here


class State(StrEnum):
    """Of a point."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


def load_json(path: Path) -> dict[str, Any]:
    """What the file holds; nothing if it is absent or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_state(run_dir: Path) -> State:
    """The state of the point whose folder this is, to a command that may run it: a run of its own does not count.

    A run that was killed counts as interrupted.
    """
    if find_holder(run_dir) is not None:
        return State.RUNNING
    status = load_json(run_dir / "summary.json").get("status")
    if status in (State.DONE, State.FAILED, State.INTERRUPTED):
        return State(status)
    return State.INTERRUPTED if load_json(run_dir / "job.json") else State.PENDING


def read_own_state(run_dir: Path) -> State:
    """The same to a command that watches: what this process runs now is running."""
    return State.RUNNING if is_held_here(run_dir) else read_state(run_dir)


def describe_job(run_dir: Path) -> str:
    """Who runs the point, for a message."""
    return describe_holder(find_holder(run_dir) or load_json(run_dir / "job.json"))


@contextmanager
def record_job(run_dir: Path, code: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hold the folder and keep ``job.json`` while the block runs; what the caller adds to the record is written, too.

    Errors: ``FolderInUse``, before anything is written; ``UserError`` when the folder cannot be written.
    """
    path = run_dir / "job.json"
    job = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),  # of every task of an array its own
        "started_at": time.time(),
        "code": code,
    }
    with hold_folder(run_dir):
        write_text_atomic(path, json.dumps(job, indent=2) + "\n")
        try:
            yield job
        finally:
            write_text_atomic(path, json.dumps({**job, "ended_at": time.time()}, indent=2) + "\n")
