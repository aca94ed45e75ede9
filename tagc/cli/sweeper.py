"""Hydra's sweeper for this project: all points are checked before the first starts, and only what is missing runs.

Hydra's launcher gets all missing points in one list, so on SLURM they are one array.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, flag_override

from tagc.cli import entry as cli
from tagc.config import Config, find_unused, key_of, refuse_unused
from tagc.errors import SweepStopped, UserError
from tagc.host.device import resolve_device
from tagc.host.run_lock import wait_for_signs
from tagc.sweep.code import check_same_code, describe_code
from tagc.sweep.identity import Point, name_folder
from tagc.sweep.jobs import is_first_node
from tagc.sweep.live import live_table
from tagc.sweep.states import State, describe_job, load_json, read_state

TARGET = "hydra_plugins.tagc.PointSweeper"  # conf/config.yaml; Hydra takes sweepers of no other package
MARKER = "multirun.yaml"  # Hydra's own file; a folder with it is a sweep's

logger = logging.getLogger("tagc")


def register_sweeper() -> None:
    """Make :class:`PointSweeper` known to Hydra."""
    Plugins.instance().class_name_to_class[TARGET] = PointSweeper


class PointSweeper(Sweeper):
    """Expands the grid as Hydra's own sweeper does; the folder and the state of each point are its own affair.

    params: more overrides, a grid among them (``hydra.sweeper.params`` of an experiment); the command line wins.
    max_batch_size: the launcher gets no more points at once; None: all.
    """

    def __init__(self, max_batch_size: int | None = None, params: dict[str, str] | None = None) -> None:
        self._max_batch_size, self._params = max_batch_size, params or {}
        self._has_failed = False  # a job of the last launch

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra, before :meth:`sweep`."""
        self._config, self._loader = config, hydra_context.config_loader
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run what is missing of the grid. Errors: ``UserError`` before anything starts, and when a point failed."""
        options = self._config.sweep
        sweep_dir = Path(str(self._config.hydra.sweep.dir)).absolute()
        points = self._expand(arguments, sweep_dir)
        wanted = _select(points, options.only)
        is_first = is_first_node(wanted[0].config.cluster.nodes)
        with _claim_sweep(sweep_dir, is_whole=options.only is None):
            with cli.log_lines_shown():
                missing = _find_missing(wanted, sweep_dir, is_first)
            if missing and not options.mixed_code:
                check_same_code([point.run_dir for point in points], describe_code(), sweep_dir)
            _save_marker(self._config, sweep_dir)
            cli.JobReport.points = [(point.run_dir, point.shown) for point in wanted]
            with live_table(wanted, sweep_dir) as has_live_table:
                cli.JobReport.has_live_table = has_live_table
                self._run_missing(missing, options.retries)
        unfinished = [point for point in wanted if read_state(point.run_dir) is not State.DONE]
        if not is_first:  # its own share counts; it may not see the first node's files yet
            if self._has_failed:
                raise UserError("this node's share of the run failed; see the first node's log")
        elif unfinished:
            raise UserError(_describe_end(unfinished, len(wanted)))

    def _run_missing(self, missing: list[Point], retries: int) -> None:
        for attempt in range(1 + retries):
            if attempt:
                missing = [point for point in missing if _is_worth_a_retry(point.run_dir)]
                if missing:
                    with cli.log_lines_shown():
                        logger.info("trying %d failed point(s) again", len(missing))
            if not missing or not self._launch(missing):
                break

    def _expand(self, arguments: list[str], sweep_dir: Path) -> list[Point]:
        """Compose and validate every point. Errors: one ``UserError`` that lists all that are wrong."""
        if any(word.startswith("hydra.sweep.subdir=") for word in self._config.hydra.overrides.hydra):
            raise UserError("hydra.sweep.subdir: a point's folder is named after what it runs; set hydra.sweep.dir")
        parser = OverridesParser.create(config_loader=self._loader)
        words = [*(f"{key}={values}" for key, values in self._params.items()), *arguments]
        overrides = parser.parse_overrides(words)
        if any(override.key_or_group == "experiment" and override.is_sweep_override() for override in overrides):
            raise UserError(
                "experiment: each brings a grid of its own, which a sweep over experiments would leave out; give one "
                "command for each"
            )
        grid = BasicSweeper.split_arguments(overrides, None)[0]
        configs, wrong = self._compose_all(grid)
        if wrong:
            heading = f"{len(wrong)} of {len(grid)} points cannot run, so none was started:\n  "
            raise UserError((heading if len(grid) > 1 else "") + "\n  ".join(wrong))
        points = _merge_equal(grid, configs, sweep_dir)
        if len(points) < len(grid):
            with cli.log_lines_shown():
                logger.info(
                    "%d of %d points left out: they differ from others only in keys that their method does not use",
                    len(grid) - len(points),
                    len(grid),
                )
        _refuse_duplicates(points)
        return points

    def _compose_all(self, grid: Sequence[Sequence[str]]) -> tuple[list[Config], list[str]]:
        """The configurations of all points, and what is wrong with them, one message a point.

        A key that a point's method does not use is left out of that point if another point uses it; else it is
        refused.
        """
        configs, wrong = [], []
        for number, settings in enumerate(grid):
            try:
                configs.append(self._compose(settings))
            except Exception as error:
                wrong.append(_describe_wrong(error, number, settings, len(grid)))
        if wrong:
            return configs, wrong
        used = {key_of(word) for config, words in zip(configs, grid, strict=True) for word in _used(config, words)}
        for number, (config, settings) in enumerate(zip(configs, grid, strict=True)):
            try:
                refuse_unused(config, [word for word in settings if key_of(word) not in used])
            except UserError as error:
                wrong.append(_describe_wrong(error, number, settings, len(grid)))
        return configs, wrong

    def _compose(self, overrides: Sequence[str]) -> Config:
        composed = self._loader.load_sweep_config(self._config, list(overrides))
        choices = dict(composed.hydra.runtime.choices)
        task = copy.deepcopy(composed)
        with flag_override(task, ["struct", "readonly"], [False, False]):
            del task["hydra"]
        config = cli.to_config(task, choices, overrides=())
        if config.cluster.name == "local":
            resolve_device(config.cluster.device, config.cluster.ranks_per_node)
        return config

    def _launch(self, points: list[Point]) -> bool:
        """Hand the points to Hydra's launcher; returns False if ``sweep.fail_fast`` has ended the sweep."""
        size, self._has_failed = self._max_batch_size or len(points), True
        returned: list[JobReturn] = []
        try:
            for first in range(0, len(points), size):
                batch = [list(point.overrides) for point in points[first : first + size]]
                returned += self._launcher.launch(batch, initial_job_idx=first)
        except SweepStopped:
            return False
        except OSError as error:  # Hydra writes into a point's folder before the point begins
            raise UserError(
                f"{error.filename or self._config.hydra.sweep.dir} cannot be written ({error.strerror}); free space or "
                "fix its permissions; the same command then goes on"
            ) from error
        self._has_failed = any(job.status is not JobStatus.COMPLETED for job in returned)
        return True


def _describe_wrong(error: Exception, number: int, settings: Sequence[str], count: int) -> str:
    message = cli.explain_error(error)
    if message is None:
        raise error
    return message if count == 1 else f"point {number} ({' '.join(settings)}): {message}"


def _used(config: Config, settings: Sequence[str]) -> list[str]:
    unused = find_unused(config, settings)
    return [word for word in settings if word not in unused]


def _merge_equal(grid: Sequence[Sequence[str]], configs: Sequence[Config], sweep_dir: Path) -> list[Point]:
    """The points of the sweep, without the overrides that their method ignores.

    Points that differ only in these are one point: ``compressor=fsdp,tagc2 compressor.sparsity=0.8,0.9`` are three.
    """
    points: list[Point] = []
    seen: set[tuple[str, ...]] = set()
    for settings, config in zip(grid, configs, strict=True):
        words = tuple(_used(config, settings))
        if len(words) < len(settings) and words in seen:
            continue
        seen.add(words)
        name = name_folder(config)
        points.append(Point(len(points), (*words, f"hydra.sweep.subdir={name}"), config, sweep_dir / name))
    return points


def _refuse_duplicates(points: Sequence[Point]) -> None:
    first: dict[Path, Point] = {}
    for point in points:
        twin = first.setdefault(point.run_dir, point)
        if twin is not point:
            raise UserError(
                f"points {twin.number} ({twin.settings}) and {point.number} ({point.settings}) are the same run: they "
                "differ in nothing that decides a number; drop one"
            )


def _select(points: list[Point], only: int | None) -> list[Point]:
    if only is None:
        return points
    if not 0 <= only < len(points):
        raise UserError(f"sweep.only={only}: the sweep has {len(points)} points, 0 to {len(points) - 1}")
    return [points[only]]


def _find_missing(points: list[Point], sweep_dir: Path, is_first: bool) -> list[Point]:
    """Those that are not done. Errors: ``UserError`` if one is being run by somebody else than our own first node."""
    if is_first:
        wait_for_signs([point.run_dir for point in points])
    states = [read_state(point.run_dir) for point in points]
    for point, state in zip(points, states, strict=True):
        if state is State.RUNNING and is_first:
            raise UserError(
                f"point {point.number} ({point.settings}) of {sweep_dir} is being run by "
                f"{describe_job(point.run_dir)}; wait for it, or choose another folder with hydra.sweep.dir"
            )
        if point.run_dir.exists() and not point.run_dir.is_dir():
            raise UserError(f"{point.run_dir} is in the way of the folder of point {point.number}; move it away")
    counts = {state: states.count(state) for state in State if state in states}
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    logger.info("sweep in %s: %d point(s), %s", sweep_dir, len(points), told)
    for point, state in zip(points, states, strict=True):
        what = {State.DONE: "skipped, done", State.INTERRUPTED: "continued", State.FAILED: "tried again"}.get(state)
        if what:
            logger.info("  point %d %s: %s", point.number, what, point.settings)
    return [point for point, state in zip(points, states, strict=True) if state is not State.DONE]


def _is_worth_a_retry(run_dir: Path) -> bool:
    return read_state(run_dir) is State.FAILED and not load_json(run_dir / "job.json").get("is_bad_input")


def _describe_end(unfinished: Sequence[Point], count: int) -> str:
    lines = []
    for point in unfinished:
        error = point.run_dir / "error.txt"
        lines.append(f"point {point.number} {read_state(point.run_dir)}: {error if error.exists() else point.run_dir}")
    return f"{len(unfinished)} of {count} points are not done; the same command goes on:\n  " + "\n  ".join(lines)


@contextlib.contextmanager
def _claim_sweep(sweep_dir: Path, is_whole: bool) -> Iterator[None]:
    """Create the folder of the sweep and, if it is run as a whole, hold it against a second command.

    Errors: ``UserError`` if it cannot be written, holds something else, or a sweep on this host uses it.
    """
    try:
        sweep_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=sweep_dir, buffering=0) as probe:
            probe.write(b"probe")
        contents = [name for name in os.listdir(sweep_dir) if not name.startswith(".")]
        handle = os.open(sweep_dir, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"the folder of the sweep, {sweep_dir}, cannot be written ({error.strerror}); free space or fix its "
            "permissions, or set hydra.sweep.dir to another one"
        ) from error
    try:
        if contents and MARKER not in contents:
            raise UserError(
                f"{sweep_dir} is not the folder of a sweep: it holds {contents[0]} but no {MARKER}; set "
                "hydra.sweep.dir to a new or empty one"
            )
        try:
            if is_whole:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another sweep is running in {sweep_dir}; wait for its end, or choose another folder with "
                "hydra.sweep.dir"
            ) from None
        except OSError:
            pass  # some network file systems have no locks; the points are protected by their own records
        yield
    finally:
        os.close(handle)


def _save_marker(config: DictConfig, sweep_dir: Path) -> None:
    from tagc.host.files import write_text_atomic

    write_text_atomic(sweep_dir / MARKER, OmegaConf.to_yaml(config))
