"""The record of one run: rank 0 writes it with :class:`Recorder`, the other ranks hold a :class:`NullRecorder`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.files import explain_write_errors, prepare_run_dir, write_text_atomic
from tagc.record.console import get_console
from tagc.record.manifest import write_config, write_manifest
from tagc.record.progress import StepDisplay
from tagc.record.rows import MetricsFile, Row, clean_row, cut_rows, load_rows
from tagc.record.summary import summarise
from tagc.record.wandb.mirror import WandbMirror

Status = Literal["done", "failed", "interrupted"]
RECORD = (
    *("metrics.jsonl", "layers.jsonl", "summary.json", "manifest.json", "config.yaml", "log.txt"),
    *("profile", "checkpoints", "wandb"),
)

logger = logging.getLogger("tagc")


class NullRecorder:
    """The interface of :class:`Recorder` for ranks that record nothing."""

    def step(self, row: Row) -> None:
        """Ignore the row."""

    def layers(self, rows: Sequence[Row]) -> None:
        """Ignore the rows."""

    def log(self, message: str) -> None:
        """Ignore the message."""

    def finish(self, status: Status, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return an empty summary."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Recorder(NullRecorder):
    """Writes the run folder: config.yaml and manifest.json first, the rows as they come, summary.json at the end.

    ``manifest`` comes from :func:`tagc.record.build_manifest`. ``resume_step=k`` continues the record in the folder:
    rows after step k are dropped (they will be written again) and the W&B run id is kept. Without it a record that is
    in the folder already is moved to ``earlier/<n>/``, so two runs never mix in one file.

    As a context manager: an exception ends the run as ``failed`` (``interrupted`` for Ctrl-C), with the error in the
    summary; leaving without :meth:`finish` ends it as ``done``.
    Errors: ``UserError`` naming the folder and the remedy whenever it cannot be written.
    """

    def __init__(self, run_dir: Path, config: Config, manifest: dict[str, Any], resume_step: int | None = None) -> None:
        self.run_dir = prepare_run_dir(Path(run_dir))
        self._config, self._resume_step = config, resume_step or 0
        self._metrics_path, self._layers_path = self.run_dir / "metrics.jsonl", self.run_dir / "layers.jsonl"
        if resume_step is None:
            set_aside_earlier_record(self.run_dir)
        else:
            self._drop_rows_after(resume_step)
        write_config(self.run_dir, config)
        self.manifest = write_manifest(self.run_dir, manifest)
        if "git_commit_missing" in manifest:
            logger.warning("manifest.json has no git_commit: %s", manifest["git_commit_missing"])
        self._metrics = MetricsFile(self._metrics_path)
        self._layers: MetricsFile | None = None  # only a run that has layers to describe gets the file
        self._mirror = WandbMirror(self.run_dir, self.manifest["wandb_mode"])
        self._display = StepDisplay(config.trainer.max_steps, config.logging.console_every, get_console())
        self._summary: dict[str, Any] | None = None

    def _drop_rows_after(self, step: int) -> None:
        kept = cut_rows(self._metrics_path, step)
        if kept < step:  # the machine went down before they were on the disk, or the disk was full
            logger.warning("%s lacks %d of the %d steps before", self._metrics_path, step - kept, step)
        cut_rows(self._layers_path, step)
        with explain_write_errors(self.run_dir):  # its status is no longer true
            (self.run_dir / "summary.json").unlink(missing_ok=True)

    def step(self, row: Row) -> None:
        """Record one optimizer step: a flat row with an int ``step`` (finished steps, from 1).

        Values are int, float, str, bool or None (else ``TypeError``); a non-finite float is stored as null.
        """
        row = clean_row(row)
        self._metrics.append(row)
        self._display.update(row)

    def layers(self, rows: Sequence[Row]) -> None:
        """Record what the layers did in a step, a row each with ``step`` and ``layer``; to be called before its row.

        Errors: as for :meth:`step`; ``UserError`` when ``layers.jsonl`` cannot be opened.
        """
        if not rows:
            return
        if self._layers is None:
            self._layers = MetricsFile(self._layers_path)
        for row in rows:
            self._layers.append(clean_row(row))

    def log(self, message: str) -> None:
        """One line for console and log.txt."""
        logger.info("%s", message)

    def finish(self, status: Status, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """End the record and return the summary: ``status``, the numbers of :func:`summarise`, then ``extra``.

        The returned dict also has ``run_dir``. A later call only changes status and extra (a failure after the end).
        """
        first = self._summary is None
        if self._summary is None:
            self._display.close()
            self._metrics.close()
            if self._layers is not None:
                self._layers.close()
            rows = load_rows(self._metrics_path)
            self._summary = {"status": status, **summarise(rows, self._config, self._resume_step)}
        summary = self._summary = {**self._summary, "status": status, **(extra or {})}
        try:
            text = json.dumps(_finite(summary), indent=2, default=str, allow_nan=False)
            write_text_atomic(self.run_dir / "summary.json", text + "\n")
        finally:
            if first:
                self._mirror.finish(status)
        return {**summary, "run_dir": str(self.run_dir)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self._summary is None:
                self.finish("done")
            return
        status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            self.finish(status, {"error": f"{type(error).__name__}: {error}"})
        except UserError as second:  # the folder is gone or full: the first error is the one to show
            logger.error("%s", second)


def _finite(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in summary.items()
    }


def set_aside_earlier_record(run_dir: Path) -> Path | None:
    """Move the record of an earlier run in this folder to ``earlier/<n>/``; returns where, None if there is none."""
    if not any((run_dir / name).exists() for name in ("metrics.jsonl", "summary.json", "checkpoints")):
        return None
    with explain_write_errors(run_dir):
        number = 1 + max((int(path.name) for path in (run_dir / "earlier").glob("[0-9]*")), default=0)
        target = run_dir / "earlier" / str(number)
        target.mkdir(parents=True)
        for name in RECORD:
            if (run_dir / name).exists():
                (run_dir / name).rename(target / name)
    logger.warning("%s holds an earlier run; its record is now in %s", run_dir, target)
    return target
