"""Between Hydra and the rest of the program.

The modules of this package and ``tagc/config/check.py`` are the only ones that import Hydra or OmegaConf.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError

from tagc.cli.help import register_help
from tagc.cli.messages import check_keys, explain
from tagc.cli.slurm_array import register_launcher
from tagc.config import CONF_DIR, Config, from_omegaconf, refuse_unused
from tagc.errors import SweepStopped, UserError
from tagc.host.pipe import CLOSED_PIPE, flush_stdout
from tagc.host.run_lock import FolderInUse, find_holder, wait_for_signs
from tagc.launch import RunInterrupted, handle_signals, launch
from tagc.sweep.jobs import run_point
from tagc.sweep.states import State, load_json, read_state


def register_schema() -> None:
    """Tell Hydra the schema, as ``base_config``, the launcher of ``cluster=slurm`` and the text of ``--help``.

    With the schema Hydra checks the type of what files and overrides set.
    """
    ConfigStore.instance().store(name="base_config", node=Config)
    register_launcher()
    register_help()


def to_config(
    composed: DictConfig, choices: Mapping[str, Any] | None = None, overrides: Iterable[str] | None = None
) -> Config:
    """Validate what Hydra composed.

    choices: the option of each group; overrides: what was set explicitly; of the running job by default.
    Errors: ``UserError`` naming the key, the value and the remedy; also for an override that the chosen method ignores.
    """
    check_keys(composed)
    if choices is None and HydraConfig.initialized():
        choices = HydraConfig.get().runtime.choices
    for group in (item.name for item in fields(Config) if (CONF_DIR / item.name).is_dir()):
        choice = group if choices is None else choices.get(group)
        if not isinstance(choice, str) and group != "experiment":
            raise UserError(f"{group}={choice}: choose exactly one option of conf/{group}/ (a sweep needs -m)")
    config = from_omegaconf(composed)
    if overrides is None:
        overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    refuse_unused(config, overrides)
    return config


def compose_config(overrides: Iterable[str]) -> Config:
    """The validated configuration that ``python run.py OVERRIDES`` would run; nothing is run.

    Overrides that the method does not use have no effect here, so that several methods can share their overrides.
    """
    register_schema()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_config(compose("config", overrides=list(overrides)), overrides=())


def launch_job(config: Config) -> None:
    """Run ``config`` in the folder that Hydra made for this job, and print the run's table."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    is_point = HydraConfig.get().mode is RunMode.MULTIRUN
    if config.sweep.only is not None and not is_point:
        raise UserError(f"sweep.only={config.sweep.only} picks a point of a sweep; add -m")
    with log_lines_shown():
        summary = run_point(config, run_dir, launch) if is_point else launch(config, run_dir)
    if summary and not JobReport.has_live_table:  # on a run's other nodes there is no summary
        _print_table([summary])
    if is_point and config.sweep.only is None and "stop_signal" in summary and JobReport.has_more():
        raise RunInterrupted(summary["stop_signal"])  # this point is done; the sweep was asked to end


class _StdoutHandler(logging.StreamHandler[TextIO]):
    """Says nothing about a pipe that its reader has closed: the run goes on and its folder holds the log."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)


@contextlib.contextmanager
def log_lines_shown() -> Iterator[None]:
    """What the launcher itself says (making the data, setting an old record aside) goes to stdout; ranks log alone."""
    logger = logging.getLogger("tagc")
    level, handler = logger.level, _StdoutHandler(sys.stdout)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Hydra's root logger would say every line again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


def _load_job(run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """A point's summary, as far as there is one, with its state, its folder and the overrides that made it."""
    state = {"status": str(read_state(run_dir)), "run_dir": str(run_dir), "overrides": overrides}
    return {**load_json(run_dir / "summary.json"), **state}


def _print_table(summaries: list[dict[str, Any]]) -> None:
    from tagc.record import print_table  # brings torch; see tagc/launch/launcher.py

    try:
        print_table(summaries)
    except (OSError, SystemExit):  # a full disk or a closed pipe behind stdout; rich turns the latter into an exit
        sys.stderr.write("the table could not be written to stdout; the summaries are in the run folders\n")


def explain_error(error: Exception) -> str | None:
    """The message for an error that the user can fix; ``None`` for a bug in the program."""
    return explain(error, sys.argv[1:], CONF_DIR)


class _JobFailed(BaseException):
    """Carries a job's exception past Hydra, which would print a line of its own before raising it again."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class JobReport(Callback):
    """Tells of each failed job of a sweep when it fails, and shows one table of all jobs at the end."""

    points: list[tuple[Path, list[str]]] | None = None  # folder and overrides; of the sweep that runs in this process
    has_live_table = False  # a table of the sweep's points is shown while they run

    @classmethod
    def has_more(cls) -> bool:
        """Whether a sweep runs in this process and points of it are not done."""
        return any(read_state(folder) is not State.DONE for folder, _ in cls.points or ())

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a folder in use before Hydra writes its own files into it."""
        try:
            run_dir = Path(str(config.hydra.run.dir)).absolute()
        except InterpolationResolutionError:  # the default: a new folder, named once the job is known
            return
        wait_for_signs([run_dir])
        if (holder := find_holder(run_dir)) is not None:
            raise _JobFailed(FolderInUse(run_dir, holder))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Tell of a failed job; in a sweep the others still run."""
        if job_return.status is not JobStatus.FAILED:
            return
        error = job_return._return_value
        if config.hydra.mode is not RunMode.MULTIRUN:
            raise _JobFailed(error)
        message = explain_error(error) or f"{type(error).__name__}: {error}"
        overrides = " ".join(job_return.overrides or [])
        sys.stderr.write(f"error in job {config.hydra.job.num} ({overrides}): {message}\n")
        if config.sweep.fail_fast and JobReport.points is not None:
            raise SweepStopped

    @classmethod
    def show(cls) -> None:
        """One row per point of the sweep, those that were done before included."""
        _print_table([_load_job(*point) for point in cls.points or ()])


def run(main: Callable[[], None]) -> int:
    """As :func:`_run`; a signal that arrives during the clean-up does not interrupt it."""
    with handle_signals() as inbox:
        try:
            return _run(main)
        finally:
            inbox.ignore_until_exit()


def _run(main: Callable[[], None]) -> int:
    """Call the Hydra entry ``main`` and return the exit code; an error the user can fix is one message on stderr.

    If the reader of stdout has closed its pipe, what was to be shown is lost and the exit code of success becomes 141.
    With ``HYDRA_FULL_ERROR=1`` in the environment every error keeps its traceback.
    """
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets exceptions through instead of printing and exiting itself
    try:
        main()
        return 0 if flush_stdout() else CLOSED_PIPE
    except BrokenPipeError as broken:
        if flush_stdout():  # another pipe, such as one between processes
            error: Exception = broken
        else:
            return CLOSED_PIPE
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
        flush_stdout()
    message = explain_error(error)
    if full_error or message is None:
        raise error
    return _say(f"error: {message}", 1)


def _say(message: str, exit_code: int) -> int:
    sys.stderr.write(message + "\n")
    return exit_code
