"""One command at a time in a run folder: the lock file ``.lock``, held while a run lasts and removed at its end.

The kernel's lock (flock) on that file decides between processes of one machine, whatever process ids they see (PID
namespaces, containers), and vanishes with its holder. It does not reach over every file system, so the holder also
touches the file every :data:`HEARTBEAT_S`. A lock that another machine left is watched: its run lives if the file's
time changes within :data:`SILENCE_S` of the local monotonic clock. Two clocks are never compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tagc.errors import UserError
from tagc.host.files import explain_write_errors, prepare_run_dir

LOCK_NAME = ".lock"
HEARTBEAT_S = 15.0
SILENCE_S = 4 * HEARTBEAT_S  # a holder on another machine that is silent for so long has ended
POLL_S = 0.5
_PROBES_S = 1.0  # another process may hold the kernel's lock for a moment to look at it

log = logging.getLogger("tagc")
_held: set[Path] = set()  # by this process


class FolderInUse(UserError):
    """The run folder belongs to a run that is still going on."""

    def __init__(self, run_dir: Path, holder: dict[str, Any]) -> None:
        super().__init__(
            f"the run folder {run_dir} is in use by another run, {describe_holder(holder)}; wait for its end, or set "
            "hydra.run.dir (hydra.sweep.dir in a sweep) to a new one"
        )


class Sign(NamedTuple):
    """What a look at a lock file tells."""

    holder: dict[str, Any] | None  # who holds it; None: nobody else
    is_certain: bool = True  # False: its machine is another one, and it must be watched longer


class LockWatch:
    """Looks at lock files again and again, and remembers when their times changed."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, float, bool]] = {}  # file's time, when that was first seen, seen to change

    def look(self, run_dir: Path) -> Sign:
        """Who else holds the folder, without waiting. A run of this process does not count."""
        path = Path(run_dir).absolute() / LOCK_NAME
        if path.parent in _held:
            return Sign(None)
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError:
            return Sign(None)
        try:
            if (is_free := _try_flock(handle, fcntl.LOCK_SH)) is False:
                return Sign(_read(handle))
            return self.judge(path, handle, has_flock=is_free is True)
        finally:
            os.close(handle)

    def judge(self, path: Path, handle: int, *, has_flock: bool) -> Sign:
        """Whether the lock's holder lives, where the kernel's lock does not say so."""
        holder = _read(handle)
        is_requeued = holder.get("slurm_job") and holder["slurm_job"] == os.environ.get("SLURM_JOB_ID")
        if is_requeued and holder.get("slurm_restarts") != os.environ.get("SLURM_RESTART_COUNT"):
            return Sign(None)  # SLURM has ended all of our job before it started it again
        if has_flock and holder.get("machine", _name_machine()) == _name_machine():
            return Sign(None)  # killed
        now_s, changed_ns = time.monotonic(), os.fstat(handle).st_mtime_ns
        before = self._seen.get(path)
        if before is None or before[0] != changed_ns:
            before = self._seen[path] = (changed_ns, now_s, before is not None)
        is_silent = now_s - before[1] >= SILENCE_S
        return Sign(None if is_silent else holder, is_silent or before[2])


_watch = LockWatch()


def find_holder(run_dir: Path) -> dict[str, Any] | None:
    """Who else seems to hold the folder, without waiting; None: nobody."""
    return _watch.look(run_dir).holder


def is_held_here(run_dir: Path) -> bool:
    """Whether this process holds the folder."""
    return Path(run_dir).absolute() in _held


def wait_for_signs(run_dirs: Iterable[Path]) -> None:
    """Wait until it is certain for each folder whether somebody else holds it: at most :data:`SILENCE_S`."""
    is_told = False
    while unclear := [folder for folder in run_dirs if not _watch.look(folder).is_certain]:
        if not is_told:
            log.info(
                "waiting up to %.0f s to see whether %s still runs in %s",
                SILENCE_S,
                describe_holder(find_holder(unclear[0]) or {}),
                unclear[0],
            )
            is_told = True
        time.sleep(POLL_S)


def describe_holder(holder: dict[str, Any]) -> str:
    """Who holds a lock, for a message."""
    if not holder:
        return "another process"
    slurm = f", SLURM job {holder['slurm_job']}" if holder.get("slurm_job") else ""
    return f"process {holder.get('pid')} on {holder.get('host')}{slurm}"


@contextlib.contextmanager
def hold_folder(run_dir: Path) -> Iterator[None]:
    """Create the run folder and hold it against every other command. Within a block of this process: does nothing.

    Errors: :class:`FolderInUse` if another command holds it, before anything but the lock file is touched;
    ``UserError`` if the folder cannot be written.
    """
    run_dir = Path(run_dir).absolute()
    if run_dir in _held:
        yield
        return
    handle = _acquire(prepare_run_dir(run_dir))
    _held.add(run_dir)
    ended = threading.Event()
    heartbeat = threading.Thread(target=_touch_until, args=(handle, ended), name="heartbeat", daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        ended.set()
        heartbeat.join()  # the handle's number may be another file's soon
        _held.discard(run_dir)
        with contextlib.suppress(OSError):
            if _is_at(run_dir / LOCK_NAME, handle):
                (run_dir / LOCK_NAME).unlink()
        os.close(handle)


def _acquire(run_dir: Path) -> int:
    """A handle of the folder's lock file, which is then ours."""
    path = run_dir / LOCK_NAME
    while True:
        with explain_write_errors(run_dir):
            handle, is_new = _open(path)
        try:
            has_flock = _flock_or_refuse(run_dir, handle)
            if not _is_at(path, handle):  # its holder has ended and removed it
                os.close(handle)
                continue
            if not is_new:
                _wait_until_free(path, handle, has_flock)
                if not has_flock:  # nothing orders those who found it silent but the renaming
                    with contextlib.suppress(FileNotFoundError):
                        path.rename(path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}.stale"))
                    _remove_stale(run_dir)
                    os.close(handle)
                    continue
            with explain_write_errors(run_dir):
                token = _write(handle)
            if not has_flock:
                time.sleep(POLL_S)
                if not _is_at(path, handle) or _read(handle).get("token") != token:
                    raise FolderInUse(run_dir, _read(handle))
            return handle
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(handle)
            raise


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False


def _flock_or_refuse(run_dir: Path, handle: int) -> bool:
    """Take the kernel's lock; returns whether this file system has it. Errors: :class:`FolderInUse`."""
    end_s = time.monotonic() + _PROBES_S
    while (taken := _try_flock(handle, fcntl.LOCK_EX, keep=True)) is False:
        if time.monotonic() > end_s:
            raise FolderInUse(run_dir, _read(handle))
        time.sleep(0.05)
    return taken is True


def _wait_until_free(path: Path, handle: int, has_flock: bool) -> None:
    """Watch a lock that was left behind. Errors: :class:`FolderInUse` if its holder shows a sign of life."""
    is_told = False
    while (sign := _watch.judge(path, handle, has_flock=has_flock)).holder is not None:
        if sign.is_certain or not _is_at(path, handle):
            raise FolderInUse(path.parent, sign.holder)
        if not is_told:
            log.info(
                "%s has held %s; waiting up to %.0f s to see whether it still runs",
                describe_holder(sign.holder),
                path.parent,
                SILENCE_S,
            )
            is_told = True
        time.sleep(POLL_S)


def _remove_stale(run_dir: Path) -> None:
    for stale in run_dir.glob(f"{LOCK_NAME}.*.stale"):
        stale.unlink(missing_ok=True)


def _try_flock(handle: int, kind: int, *, keep: bool = False) -> bool | None:
    """Whether the kernel's lock can be had; None where the file system has none."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    if not keep:
        fcntl.flock(handle, fcntl.LOCK_UN)
    return True


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _read(handle: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(handle: int) -> str:
    token = uuid.uuid4().hex
    holder = {
        "host": socket.gethostname(),
        "machine": _name_machine(),
        "pid": os.getpid(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restarts": os.environ.get("SLURM_RESTART_COUNT"),
        "token": token,
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)
    os.fsync(handle)
    return token


def _touch_until(handle: int, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):
            os.utime(handle)


def _name_machine() -> str:
    """The same for all processes under one running kernel, containers included; host names are not (Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
