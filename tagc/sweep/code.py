"""Which code a point was computed with, so that a sweep does not mix two versions unnoticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tagc.errors import UserError
from tagc.sweep.states import State, load_json, read_state

PACKAGE = Path(__file__).resolve().parent.parent


def describe_code() -> dict[str, Any]:
    """Commit and dirty flag for the reader, and a hash of the package's sources, which alone decides.

    A commit that changes the documentation is the same code; a second edit of a dirty tree is not.
    """
    from tagc.record.manifest import describe_git  # brings torch; see tagc/launch/launcher.py

    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {**describe_git(), "source": digest.hexdigest()[:16]}


def _name_code(code: dict[str, Any]) -> str:
    commit = str(code.get("git_commit") or "unknown commit")[:10]
    dirty = " with uncommitted changes" if code.get("git_dirty") else ""
    return f"{commit}{dirty} (source {code.get('source')})"


def check_same_code(run_dirs: Iterable[Path], code: dict[str, Any], sweep_dir: Path) -> None:
    """Errors: ``UserError`` if points of the sweep were computed, wholly or up to a checkpoint, with other code."""
    others: dict[str, int] = {}
    for run_dir in run_dirs:
        recorded = load_json(run_dir / "job.json").get("code") or {}
        has_work = read_state(run_dir) is State.DONE or any((run_dir / "checkpoints").glob("step_[0-9]*"))
        if has_work and recorded and recorded.get("source") != code["source"]:
            name = _name_code(recorded)
            others[name] = others.get(name, 0) + 1
    if others:
        counts = "; ".join(f"{count} point(s) with {name}" for name, count in others.items())
        raise UserError(
            f"the sweep in {sweep_dir} was begun with other code: {counts}; now {_name_code(code)}. Go back to that "
            "code, or start anew with hydra.sweep.dir=NEW_FOLDER, or mix them knowingly with sweep.mixed_code=true"
        )
