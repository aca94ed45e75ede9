"""Between Hydra and the rest: the only module beside ``tagc/config.py`` that knows what Hydra is."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from tagc.array_launcher import register_launcher
from tagc.cli_errors import check_keys, explain
from tagc.config import Config, from_omegaconf
from tagc.errors import UserError
from tagc.launch import FolderInUse, RunInterrupted, launch

CONF_DIR = Path(__file__).parent.parent / "conf"


def register_schema() -> None:
    """Make the schema known to Hydra as ``base_config``, so that it types what the files and overrides set.

    And the launcher of ``cluster=slurm``.
    """
    ConfigStore.instance().store(name="base_config", node=Config)
    register_launcher()


def to_config(composed: DictConfig) -> Config:
    """Validate what Hydra composed.

    Errors: ``UserError`` naming the key, the value and the remedy.
    """
    check_keys(composed)
    for group in (item.name for item in fields(Config) if (CONF_DIR / item.name).is_dir()):
        choice = HydraConfig.get().runtime.choices.get(group) if HydraConfig.initialized() else group
        if not isinstance(choice, str) and group != "experiment":
            raise UserError(f"{group}={choice}: choose exactly one option of conf/{group}/ (a sweep needs -m)")
    return from_omegaconf(composed)


def compose_config(overrides: Iterable[str]) -> Config:
    """The validated configuration that ``python run.py OVERRIDES`` would run; nothing is run."""
    register_schema()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_config(compose("config", overrides=list(overrides)))


def launch_job(config: Config) -> None:
    """Run ``config`` in the folder that Hydra made for this job, and print the run's table."""
    with _log_lines_shown():
        summary = launch(config, Path(HydraConfig.get().runtime.output_dir))
    if summary:  # on a run's other nodes there is none
        _print_table([summary])


@contextlib.contextmanager
def _log_lines_shown() -> Iterator[None]:
    """What the launcher itself says (making the data, setting an old record aside) goes to stdout; ranks log alone."""
    logger = logging.getLogger("tagc")
    level, handler = logger.level, logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Hydra's root logger would say every line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


def _load_job(path: Path) -> dict[str, Any]:
    """A job's summary with its folder and the overrides that made it."""
    overrides = path.parent / ".hydra" / "overrides.yaml"
    chosen = list(OmegaConf.load(overrides)) if overrides.exists() else []
    return {**json.loads(path.read_text()), "run_dir": str(path.parent), "overrides": chosen}


def _print_table(summaries: list[dict[str, Any]]) -> None:
    from tagc.record import print_table  # brings torch; see tagc/launch.py

    try:
        print_table(summaries)
    except (OSError, SystemExit):  # a full disk or a closed pipe behind stdout; rich turns the latter into an exit
        sys.stderr.write("the table could not be written to stdout; the summaries are in the run folders\n")


def _explain(error: Exception) -> str | None:
    return explain(error, sys.argv[1:], CONF_DIR)


class _JobFailed(BaseException):
    """Carries a job's exception past Hydra, which would print a line of its own before raising it again."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class JobReport(Callback):
    """Tells of each failed job of a sweep when it fails, and shows one table of all jobs at the end."""

    sweep_dir: Path | None = None  # of the sweep that runs in this process; Hydra makes the instances
    started_s = 0.0
    failed_jobs = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember the folder; older runs in it do not belong to this sweep."""
        JobReport.sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        JobReport.started_s = time.time()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Tell of a failed job; in a sweep the others still run, and Hydra raises its exception after the last one."""
        if job_return.status is not JobStatus.FAILED:
            return
        error = job_return._return_value
        if JobReport.sweep_dir is None:
            raise _JobFailed(error)
        JobReport.failed_jobs += 1
        message = _explain(error) or f"{type(error).__name__}: {error}"
        overrides = " ".join(job_return.overrides or [])
        sys.stderr.write(f"error in job {config.hydra.job.num} ({overrides}): {message}\n")
        path = Path(config.hydra.runtime.output_dir) / "summary.json"
        if not path.exists() and not isinstance(error, FolderInUse):  # it failed before it was launched
            choices = config.hydra.runtime.choices
            identity = {group: choices.get(group) for group in ("compressor", "bandwidth", "model")}
            path.write_text(json.dumps({**identity, "status": "failed", "error": message}))

    @classmethod
    def show(cls) -> None:
        """One row per job of the sweep, in the order in which they ended."""
        if cls.sweep_dir is None:
            return
        found = [(path.stat().st_mtime, path) for path in cls.sweep_dir.rglob("summary.json")]
        recent = [path for modified_s, path in sorted(found) if modified_s >= cls.started_s]
        _print_table([_load_job(path) for path in recent])


def run(main: Callable[[], None]) -> int:
    """Call the Hydra entry ``main`` and return the exit code; what a user can mend is one message on stderr.

    With ``HYDRA_FULL_ERROR=1`` in the environment every error keeps its traceback.
    """
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets exceptions through instead of printing and exiting itself
    try:
        main()
        return 0
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except RunInterrupted as stop:
        hint = "; the same command continues from the newest checkpoint" if stop.can_continue else ""
        return _say(f"interrupted by {stop.signal.name}; the ranks have ended{hint}", int(stop.code or 0))
    except _JobFailed as failed:
        error = failed.error
    except Exception as other:
        error = other
    finally:
        if not full_error:
            del os.environ["HYDRA_FULL_ERROR"]
        JobReport.show()
    message = _explain(error)
    if JobReport.failed_jobs:
        message = f"{JobReport.failed_jobs} job(s) of the sweep failed, see above"
    if full_error or message is None:
        raise error
    return _say(f"error: {message}", 1)


def _say(message: str, exit_code: int) -> int:
    sys.stderr.write(message + "\n")
    return exit_code
