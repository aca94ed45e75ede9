"""A mirror of ``metrics.jsonl`` in Weights & Biases that can neither slow nor stop training.

Everything that touches ``wandb`` (its import included) happens in one background thread that is fed by a queue.
Whatever goes wrong there becomes one warning; the rows are in ``metrics.jsonl`` in any case.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tagc.config import Config, flatten, to_dict

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 60.0  # for the upload at the end; offline takes milliseconds

logger = logging.getLogger("tagc")


@dataclass(frozen=True)
class _Finish:
    """The last item of the queue."""

    summary: dict[str, Any]
    exit_code: int


def resolve_mode(wanted: str) -> str:
    """``logging.wandb`` as W&B's own mode: ``auto`` is online when ``WANDB_API_KEY`` is set and offline otherwise."""
    if wanted == "auto":
        return "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return wanted


def _name_run(config: Config) -> str:
    parts = (config.model.name, config.compressor.name, config.bandwidth.label, f"{config.cluster.ranks}r")
    return "-".join(parts) + f"-s{config.seed}"


class WandbMirror:
    """Sends rows to W&B from a background thread. With mode ``disabled`` it does nothing and imports nothing."""

    def __init__(self, run_dir: Path, config: Config, run_id: str | None) -> None:
        self._run_dir, self._config, self._run_id = Path(run_dir), config, run_id
        self._mode: Any = resolve_mode(config.logging.wandb)
        self._items: queue.SimpleQueue[dict[str, Any] | _Finish] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._mode != "disabled":
            self._thread = threading.Thread(target=self._work, name="wandb-mirror", daemon=True)
            self._thread.start()

    def log(self, row: dict[str, Any]) -> None:
        """Queue one row; returns at once."""
        if self._thread is not None and self._thread.is_alive():
            self._items.put({key: value for key, value in row.items() if value is not None})

    def finish(self, summary: dict[str, Any], exit_code: int = 0, timeout_s: float = FINISH_TIMEOUT_S + 10) -> None:
        """Queue the headline numbers, close the W&B run and wait for it, at most ``timeout_s``."""
        if self._thread is None:
            return
        self._items.put(_Finish({key: value for key, value in summary.items() if value is not None}, exit_code))
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"it did not finish within {timeout_s:.0f} s")
        self._thread = None

    def _warn(self, reason: object) -> None:
        logger.warning(
            "W&B does not mirror this run (%s); training goes on and metrics.jsonl holds every row. "
            "logging.wandb=offline or logging.wandb=disabled avoids this",
            " ".join(str(reason).split()) or type(reason).__name__,
        )

    def _work(self) -> None:
        """The thread: open the run, pass rows on until the end. Any failure ends it with one warning."""
        try:
            run = self._open_run()
            while not isinstance(item := self._items.get(), _Finish):
                run.log(item)
            run.summary.update(item.summary)
            run.finish(exit_code=item.exit_code)
        except BaseException as error:  # a SystemExit from wandb must not end the thread with a traceback either
            self._warn(error)

    def _open_run(self) -> Any:
        import wandb

        known = wandb.Settings.model_fields  # the settings differ between releases
        wanted: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "init_timeout": INIT_TIMEOUT_S,
            "finish_timeout": FINISH_TIMEOUT_S,
            "x_service_wait": INIT_TIMEOUT_S,
            "x_disable_stats": True,  # sampling the machine would take time from the ranks
            "x_disable_meta": True,  # manifest.json has it
            "x_save_requirements": False,
            "disable_git": True,
            "disable_code": True,
        }
        settings = wandb.Settings(**{key: value for key, value in wanted.items() if key in known})
        wandb.setup(settings=settings)
        if self._mode == "online" and not wandb.login(prompt=False, verify=False):
            # wandb.init would ask for a key on the terminal, and training would seem to hang.
            raise RuntimeError("no API key: set WANDB_API_KEY or run `wandb login`")
        options, logging_ = self._config, self._config.logging
        run = wandb.init(
            mode=self._mode,
            dir=self._run_dir,
            project=logging_.wandb_project,
            group=logging_.wandb_group or options.experiment,
            tags=list(logging_.wandb_tags),
            name=_name_run(options),
            config=flatten(to_dict(options)),
            id=self._run_id,
            resume="allow",
            settings=settings,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run
