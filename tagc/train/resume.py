"""Before the ranks start: whether a run continues what its folder holds, or sets it aside and starts at step 0."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tagc.config import Config
from tagc.errors import UserError
from tagc.record.recorder import set_aside_earlier_record
from tagc.train.checkpoint_files import DamagedCheckpoint, check_config, checkpoints_dir, list_checkpoints, read_info

logger = logging.getLogger("tagc")


def prepare_start(run_dir: Path, config: Config) -> None:
    """Leave the folder as the ranks shall find it: they continue its newest readable checkpoint, if there is one.

    ``trainer.resume=auto`` sets aside a record without checkpoints, and one of a run that is finished; ``never`` every
    record; ``must`` none. What is set aside moves to ``earlier/<n>/``, checkpoints included.
    Errors: ``UserError`` when there is something to continue and this configuration cannot, or ``must`` finds nothing.
    """
    resume = config.trainer.resume
    folders = [] if resume == "never" else list_checkpoints(run_dir)
    if resume == "must":
        if not folders:
            raise UserError(
                f"trainer.resume=must, but {checkpoints_dir(run_dir)} holds no checkpoint; name the folder of an "
                "interrupted run with hydra.run.dir, or set trainer.resume=auto to start there"
            )
        if _is_finished(run_dir, config):
            raise UserError(
                f"trainer.resume=must, but the run in {run_dir} is finished; raise trainer.max_steps to go on with it"
            )
    if not folders or (resume == "auto" and _is_finished(run_dir, config)):
        set_aside_earlier_record(run_dir)  # whole, and before anything of this run can be mistaken for it
        return
    for folder in folders:  # the ranks read the files; here it only needs to be a run of this configuration
        try:
            check_config(folder, read_info(folder), config)
            break
        except DamagedCheckpoint:
            continue  # the ranks take the one before and say so
    (run_dir / "summary.json").unlink(missing_ok=True)  # its status is no longer true


def _is_finished(run_dir: Path, config: Config) -> bool:
    """Whether the folder's run has made all steps of this configuration."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return summary["status"] == "done" and summary["steps"] >= config.trainer.max_steps
    except (OSError, ValueError, KeyError, TypeError):  # killed before the end
        return False
