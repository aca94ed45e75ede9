"""Writing into a run folder: whole files at once, and failures that say which folder and what to do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tagc.errors import UserError


@contextmanager
def explain_write_errors(run_dir: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside the block into a ``UserError`` that names the folder, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        at = f" at {error.filename}" if error.filename and str(error.filename) != str(run_dir) else ""
        raise UserError(
            f"the run folder {run_dir} cannot be written ({reason}{at}); free space or fix its permissions, "
            "or choose another folder with hydra.run.dir=..."
        ) from error


def prepare_run_dir(run_dir: Path) -> Path:
    """Create the run folder and prove that a file can be written in it, before any rank starts to train.

    Errors: ``UserError`` when a file is in the way, the permission is missing, the file system is read-only or full.
    """
    run_dir = Path(run_dir)
    with explain_write_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir, buffering=0) as probe:
            probe.write(b"probe")
    return run_dir


def write_text_atomic(path: Path, text: str) -> None:
    """Write a whole file so that a reader sees the old content or the new, never half of it (temporary file + rename).

    Errors: ``UserError`` naming the folder; nothing is left behind and an older file stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path.parent):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
