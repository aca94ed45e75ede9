"""``python -m tagc.record.wandb.sync [FOLDER ...]``: upload recorded runs to W&B, as often as one likes.

Every run keeps the id of its manifest, and what is sent are the rows that the server does not have: a second call sends
nothing, and a call after more steps sends those. A run that training mirrors at the moment is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import Timeout
from rich.console import Console

from tagc.errors import UserError
from tagc.host.files import write_text_atomic
from tagc.record.rows import load_rows
from tagc.record.wandb.process import lock_mirror
from tagc.record.wandb.run import RunFeed, close_run, open_run, read_run_id, read_summary, require_key
from tagc.host.pipe import closed_pipe_ends_quietly

FOLDERS = ("outputs", "multirun")  # where Hydra puts runs and sweeps (conf/config.yaml)
UPLOAD_TIMEOUT_S = 300.0


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders at and below ``folders``; what ``earlier/`` holds is left out.

    Errors: ``UserError`` when there are none.
    """
    rows = ((path, folder) for folder in folders for path in folder.rglob("metrics.jsonl"))
    found = sorted({path.parent for path, folder in rows if "earlier" not in path.relative_to(folder).parts})
    if not found:
        raise UserError(f"no recorded run in {', '.join(map(str, folders))}; name the folder of a run or of a sweep")
    return found


def upload(run_dir: Path) -> str:
    """Upload what W&B lacks of one run; returns what was done. Errors: whatever ``wandb`` raises."""
    if read_run_id(run_dir) is None:
        return "not for W&B, its manifest.json has no run id (logging.wandb=disabled, or damaged)"
    try:
        with lock_mirror(run_dir, 0):
            return _upload_locked(run_dir)
    except Timeout:
        return "left alone, it is being mirrored now"


def _upload_locked(run_dir: Path) -> str:
    marker = run_dir / "wandb" / "uploaded.json"
    rows = load_rows(run_dir / "metrics.jsonl")
    state = {"run_id": read_run_id(run_dir), "steps": len(rows), "status": read_summary(run_dir)["status"]}
    if _load_marker(marker) == state:
        return f"nothing new, all {len(rows)} steps were uploaded before"
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(run_dir, "online", Path(folder), UPLOAD_TIMEOUT_S)
        sent, url = RunFeed(run, run_dir).log_new(), run.url
        close_run(run, run_dir)
    write_text_atomic(marker, json.dumps(state))
    for log in (run_dir / "wandb").glob("offline-run-*/*.wandb"):
        log.with_suffix(".wandb.synced").touch()  # for `wandb sync`, which would send them again
    return f"{sent} of {len(rows)} steps uploaded: {url}"


def _load_marker(marker: Path) -> dict[str, Any] | None:
    try:
        return json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent or damaged: the server knows what it has
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 1 when a run could not be uploaded."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    parser = argparse.ArgumentParser(prog="python -m tagc.record.wandb.sync", description=__doc__)
    parser.add_argument(
        "folders", type=Path, nargs="*", help="folders of runs or sweeps (default: outputs and multirun, if they exist)"
    )
    options = parser.parse_args(arguments)
    os.environ["WANDB_SILENT"] = "true"
    failed = 0
    try:
        runs = find_runs(options.folders or [Path(folder) for folder in FOLDERS])
        require_key()
    except UserError as error:
        console.print(f"error: {error}")
        return 1
    for run_dir in runs:
        try:
            outcome = upload(run_dir)
        except Exception as error:  # the next run may be all right
            failed += 1
            outcome = f"FAILED, nothing is lost: {' '.join(str(error).split()) or type(error).__name__}"
        console.print(f"{run_dir}: {outcome}")
    return 1 if failed else 0


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
