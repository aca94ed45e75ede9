"""Folders of derived files that are made once: complete or absent, checked against a manifest, rebuilt when damaged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tagc.data.progress import track_progress
from tagc.errors import UserError

MANIFEST = "manifest.json"
LOCK_TIMEOUT_S = 600.0
SILENT_WAIT_S = 1.0  # longer waits are explained

log = logging.getLogger("tagc")


def find_cache_root() -> Path:
    """``$XDG_CACHE_HOME/tagc``, or ``~/.cache/tagc``. Not created here.

    The XDG specification tells programs to ignore a relative value.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "tagc"
    try:
        return Path.home() / ".cache" / "tagc"
    except RuntimeError as error:
        raise UserError("there is no home directory to cache tokens in; set XDG_CACHE_HOME or data.path") from error


def hash_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, facts: dict[str, Any], file_names: list[str]) -> None:
    """Write ``manifest.json``: the given facts, and size and sha256 of each named file in ``folder``."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": hash_file(folder / name)} for name in file_names}
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=2, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Errors: ``OSError`` if it cannot be read, ``ValueError`` if it is not a manifest.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{folder / MANIFEST} lists no files")
    return manifest


def find_damage(folder: Path) -> str | None:
    """What is wrong with a folder according to its manifest, or None. Reads every file once."""
    try:
        for name, expected in read_manifest(folder)["files"].items():
            size_bytes = (folder / name).stat().st_size
            if size_bytes != expected["bytes"]:
                return f"{name} has {size_bytes:,} bytes instead of {expected['bytes']:,}"
            if hash_file(folder / name) != expected["sha256"]:
                return f"{name} does not match its sha256"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, OSError) as error:
        return f"{MANIFEST} or a file it lists cannot be read ({error})"
    return None


def ensure_folder(folder: Path, build: Callable[[Path], None]) -> dict[str, Any]:
    """Return the manifest of ``folder``; if it is absent or damaged, let ``build(temporary_folder)`` fill a new one.

    Safe when several processes call it at once: one builds behind a file lock, the rest wait and use the result. A
    complete folder needs no write access.

    Errors: ``UserError`` naming the folder and the remedy if it cannot be written.
    """
    if folder.is_dir() and find_damage(folder) is None:
        return read_manifest(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder):
            damage = find_damage(folder) if folder.exists() else "absent"
            if damage is not None:
                if folder.exists():
                    log.warning("the token cache %s is damaged (%s); building it again", folder, damage)
                _build_and_publish(folder, build)
            return read_manifest(folder)
    except Timeout as error:
        raise UserError(
            f"another process has held {folder}.lock for {LOCK_TIMEOUT_S:.0f} s; wait for it, or set data.path to "
            "another folder"
        ) from error
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise UserError(
            f"cannot write the token cache in {folder.parent}: {error}; set XDG_CACHE_HOME or data.path to a writable "
            "folder with free space"
        ) from error


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and leave a note of who does. One who has to wait says once for whom."""
    lock, note = FileLock(f"{folder}.lock"), folder.with_name(f"{folder.name}.holder")
    try:
        lock.acquire(timeout=SILENT_WAIT_S)
    except Timeout:
        try:
            other = note.read_text(encoding="utf-8")
        except OSError:
            other = "another process"
        log.info("waiting for %s, which makes the tokens in %s; this takes it some seconds to a minute", other, folder)
        with track_progress("waiting for the tokens", total=None):
            lock.acquire(timeout=LOCK_TIMEOUT_S)
    try:
        with suppress(OSError):
            note.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)
        lock.release()


def _build_and_publish(folder: Path, build: Callable[[Path], None]) -> None:
    """Fill a folder beside the final one and rename it. Only the holder of the lock may call this."""
    building, stale = folder.with_name(folder.name + ".building"), folder.with_name(folder.name + ".stale")
    for leftover in (building, stale):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        building.mkdir()
        build(building)
        if folder.exists():
            folder.rename(stale)
        building.rename(folder)
    finally:
        for leftover in (building, stale):
            shutil.rmtree(leftover, ignore_errors=True)
