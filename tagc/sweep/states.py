"""What a point's folder says about it. Nothing else remembers a sweep.

``summary.json`` says how a run ended. ``job.json`` says who runs it, or ran it until it was killed: host, process,
SLURM job, and the code. A process on this host is looked up; one on another host touches its ``job.json`` every
:data:`HEARTBEAT_S`, because locks do not reach over every network file system.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

HEARTBEAT_S = 30.0
SILENCE_S = 4 * HEARTBEAT_S  # a job on another host that is silent for so long has ended


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
    job = load_json(run_dir / "job.json")
    if job and is_alive(job, run_dir / "job.json"):
        return State.RUNNING
    status = load_json(run_dir / "summary.json").get("status")
    if status in (State.DONE, State.FAILED, State.INTERRUPTED):
        return State(status)
    return State.INTERRUPTED if job else State.PENDING


def read_own_state(run_dir: Path) -> State:
    """The same to a command that watches: what this process runs now is running."""
    job = load_json(run_dir / "job.json")
    is_ours = job.get("host") == socket.gethostname() and job.get("pid") == os.getpid()
    if is_ours and not job.get("ended_at") and job.get("process_start") == _process_start(os.getpid()):
        return State.RUNNING
    return read_state(run_dir)


def is_alive(job: dict[str, Any], path: Path) -> bool:
    """Whether the job of this ``job.json`` runs and is another than ours."""
    if job.get("ended_at") or (job.get("slurm_job") and job["slurm_job"] == _slurm_job()):
        return False  # the latter: SLURM has put our job back into the queue, or another of our nodes wrote it
    if job.get("host") == socket.gethostname():
        pid, start = job.get("pid"), job.get("process_start")
        return isinstance(pid, int) and pid != os.getpid() and start is not None and start == _process_start(pid)
    with suppress(OSError):
        return time.time() - path.stat().st_mtime < SILENCE_S
    return False


def describe_job(run_dir: Path) -> str:
    """Who runs the point, for a message."""
    job = load_json(run_dir / "job.json")
    slurm = f", SLURM job {job['slurm_job']}" if job.get("slurm_job") else ""
    return f"process {job.get('pid')} on {job.get('host')}{slurm}"


@contextmanager
def record_job(run_dir: Path, code: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Keep ``job.json`` while the block runs; what the caller adds to the yielded record is written at the end.

    Errors: ``UserError`` when the folder cannot be written.
    """
    from tagc.host.files import prepare_run_dir, write_text_atomic  # brings torch; see tagc/launch/launcher.py

    path = prepare_run_dir(run_dir) / "job.json"
    job = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "slurm_job": _slurm_job(),
        "started_at": time.time(),
        "code": code,
    }
    write_text_atomic(path, json.dumps(job, indent=2) + "\n")
    ended = threading.Event()
    threading.Thread(target=_touch_until, args=(path, ended), name="heartbeat", daemon=True).start()
    try:
        yield job
    finally:
        ended.set()
        write_text_atomic(path, json.dumps({**job, "ended_at": time.time()}, indent=2) + "\n")


def _touch_until(path: Path, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_S):
        with suppress(OSError):
            path.touch()


def _slurm_job() -> str | None:
    """Of every task of an array its own, the same after a requeue; a job never inherits it, as it may the array's."""
    return os.environ.get("SLURM_JOB_ID")


def _process_start(pid: int) -> str | None:
    """The time since boot at which a process started (proc(5), field 22), as ids are used again; None: no such one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
