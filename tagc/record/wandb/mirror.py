"""The mirror of a run in Weights & Biases, which can neither slow nor stop training.

A process of its own (:mod:`tagc.record.wandb.process`) reads the run folder's files as they grow: they are the queue,
so nothing is dropped, and nothing waits. Whatever goes wrong there becomes one warning here.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import tagc
from tagc.config import LoggingConfig
from tagc.errors import UserError
from tagc.host.signals import SIGNALS, block_signals

FINISH_TIMEOUT_S = 25.0
# Of a run that stops before its end: SLURM does not wait, and the next attempt passes the rest on.
STOP_TIMEOUT_S = 10.0

# As in wandb 0.31: the values of WANDB_MODE that make sense here, and what its settings refuse.
MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
TRUE_WORDS = ("1", "true", "yes", "on", "y", "t")
MAX_TAG_LENGTH = 64
MAX_PROJECT_LENGTH = 128
PROJECT_FORBIDS = "/\\#?%:"

logger = logging.getLogger("tagc")


def resolve_mode(wanted: str) -> str:
    """``logging.wandb`` as ``online``, ``offline`` or ``disabled``.

    ``auto`` follows ``WANDB_DISABLED`` and ``WANDB_MODE`` as ``wandb`` understands them; without them, it is online
    when ``WANDB_API_KEY`` is set and offline otherwise.
    Errors: ``UserError`` for a value of ``WANDB_MODE`` that is none of MODES.
    """
    if wanted != "auto":
        return wanted
    if os.environ.get("WANDB_DISABLED", "").strip().lower() in TRUE_WORDS:
        return "disabled"
    chosen = os.environ.get("WANDB_MODE", "").strip().lower()
    if not chosen:
        return "online" if os.environ.get("WANDB_API_KEY") else "offline"
    if chosen not in MODES:
        raise UserError(
            f"WANDB_MODE={os.environ['WANDB_MODE']!r} is not known; use one of {', '.join(MODES)}, or set logging.wandb"
        )
    return MODES[chosen]


def check_options(options: LoggingConfig) -> None:
    """Check, before a run starts, what W&B would refuse only afterwards.

    Errors: ``UserError`` naming ``logging.wandb_tags`` or ``logging.wandb_project`` and W&B's limit, or ``WANDB_MODE``.
    """
    if resolve_mode(options.wandb) == "disabled":
        return
    for tag in options.wandb_tags:
        if not 1 <= len(str(tag)) <= MAX_TAG_LENGTH:
            raise UserError(
                f"logging.wandb_tags={options.wandb_tags}: the tag {tag!r} has {len(str(tag))} characters; W&B takes "
                f"1 to {MAX_TAG_LENGTH}: shorten it, or set logging.wandb=disabled"
            )
    project = options.wandb_project
    bad = sorted(set(project) & set(PROJECT_FORBIDS))
    if bad or not 1 <= len(project) <= MAX_PROJECT_LENGTH:
        raise UserError(
            f"logging.wandb_project={project!r}: W&B takes 1 to {MAX_PROJECT_LENGTH} characters, none of "
            f"{PROJECT_FORBIDS}; rename it, or set logging.wandb=disabled"
        )


def build_command(run_dir: Path, mode: str) -> list[str]:
    """The command of the mirror's process."""
    return [sys.executable, "-m", "tagc.record.wandb.process", str(run_dir), mode]


def end_by_force(pid: int) -> None:
    """Kill the mirror's process, which may be this one, and W&B's service, its child.

    The service has a session of its own and ends when it notices that its parent is gone, which it cannot while it is
    stopped or stuck.
    """
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of every thread
        with suppress(OSError):  # gone meanwhile
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class WandbMirror:
    """Mirrors ``run_dir``, whose config.yaml and manifest.json exist. mode: as :func:`resolve_mode` gives it."""

    def __init__(self, run_dir: Path, mode: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False
        if mode == "disabled":
            return
        try:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
            self._process = self._start(Path(run_dir).absolute(), mode)
        except OSError as error:
            self._warn(error)
            return
        self._watcher = threading.Thread(target=self._watch, name="wandb-mirror", daemon=True)
        self._watcher.start()

    def _start(self, run_dir: Path, mode: str) -> subprocess.Popen[bytes]:
        source = str(Path(tagc.__file__).resolve().parents[1])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        with block_signals(*SIGNALS):  # SLURM sends them to all processes of a step; the mirror ends after the ranks
            return subprocess.Popen(
                build_command(run_dir, mode),
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the ranks
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )

    def _watch(self) -> None:
        assert self._process is not None
        if self._process.wait() and not self._is_given_up:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").split("\n")
            self._warn(next((line for line in reversed(lines) if line.strip()), "its process was killed"))

    def finish(self, status: str) -> None:
        """Let the mirror pass on what is left, after summary.json was written; waits a bounded time."""
        if self._process is None:
            return
        timeout_s = FINISH_TIMEOUT_S if status == "done" else STOP_TIMEOUT_S
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self._is_given_up = True
            end_by_force(self._process.pid)
            self._warn(f"it did not finish within {timeout_s:.0f} s")
        self._process = None

    def _warn(self, reason: object) -> None:
        logger.warning(
            "W&B does not mirror this run (%s); training goes on and metrics.jsonl holds every row. Upload it later "
            "with `make wandb-sync`; logging.wandb=offline or logging.wandb=disabled avoids this",
            reason,
        )
