"""One point of a sweep in the process that runs it, on this machine or in a SLURM task."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tagc.config import Config
from tagc.errors import UserError
from tagc.sweep.code import describe_code
from tagc.sweep.states import State, load_json, read_state, record_job

logger = logging.getLogger("tagc")


def is_first_node(nodes: int) -> bool:
    """Whether this process keeps the record of a run on ``nodes`` machines (``cluster.nodes``); the others only help.

    On one machine every process is the first: what else srun started is another command.
    """
    return nodes == 1 or os.environ.get("SLURM_PROCID", "0") == "0"


def run_point(config: Config, run_dir: Path, launch: Callable[[Config, Path], dict[str, Any]]) -> dict[str, Any]:
    """Run ``config`` in its folder unless it is done there; an exception leaves its traceback in ``error.txt``.

    Errors: those of :func:`tagc.launch.launch`, and ``FolderInUse`` when the point runs elsewhere.
    """
    if not is_first_node(config.cluster.nodes):
        return launch(config, run_dir)
    if read_state(run_dir) is State.DONE:  # by another command, since this sweep began
        logger.info("done already: %s", run_dir)
        return load_json(run_dir / "summary.json")
    with record_job(run_dir, describe_code()) as job:
        try:
            summary = launch(config, run_dir)
        except Exception as error:
            job["is_bad_input"] = isinstance(error, UserError)
            _leave_error(config, run_dir, error)
            raise
    (run_dir / "error.txt").unlink(missing_ok=True)
    return summary


def _leave_error(config: Config, run_dir: Path, error: Exception) -> None:
    from tagc.host.files import write_text_atomic

    write_text_atomic(run_dir / "error.txt", "".join(traceback.format_exception(error)))
    if load_json(run_dir / "summary.json").get("status") is None:  # it failed before it was launched
        settings: dict[str, Any] = {"compressor": config.compressor.name, "bandwidth": config.bandwidth.label}
        settings |= {"model": config.model.name, "ranks": config.cluster.ranks, "seed": config.seed}
        summary = {**settings, "status": "failed", "error": str(error)}
        write_text_atomic(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
