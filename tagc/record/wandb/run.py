"""A run folder as a run in W&B: everything that touches the ``wandb`` library.

The folder's files are the truth and W&B repeats them: the rows of ``metrics.jsonl`` and ``layers.jsonl``, in their
order and under their own step, the configuration, and the headline numbers of ``summary.json``.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tagc.config import BandwidthConfig, flatten
from tagc.errors import UserError
from tagc.record.columns import LAYER_COLUMNS
from tagc.record.rows import Row, RowReader

INIT_TIMEOUT_S = 20.0
LAYER_KEYS = tuple(column.name for column in LAYER_COLUMNS if column.kind is float)
HISTOGRAM_KEYS = tuple(column.name for column in LAYER_COLUMNS if column.histogram)  # over the layers of one step
HISTOGRAM_BINS = 16


def require_key() -> None:
    """Errors: ``UserError`` when nobody is logged in to W&B. Never asks on the terminal."""
    import wandb

    os.environ.pop("WANDB_MODE", None)  # while it says "offline", wandb.login finds no key
    if not wandb.login(prompt=False, verify=False):
        raise UserError("W&B has no API key: set WANDB_API_KEY, or log in once with `wandb login`")


def read_run_id(run_dir: Path) -> str | None:
    """The id that the run keeps for its whole life; None with ``logging.wandb=disabled``, or without a manifest."""
    try:
        manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest.get("wandb_run_id")


def describe_run(run_dir: Path) -> dict[str, Any]:
    """The arguments of ``wandb.init`` that say what the run is: id, project, group, tags, name, config.

    ``config`` is flat, keys as on the command line (``compressor.sparsity``); what the manifest knows comes as
    ``manifest.kernels``, ``versions.torch``, ``hardware.cpu_model`` and so on.
    """
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    options, label = config["logging"], BandwidthConfig(**config["bandwidth"]).label
    parts = (config["model"]["name"], config["compressor"]["name"], label, f"{config['cluster']['ranks']}r")
    facts = {key: value for key, value in manifest.items() if isinstance(value, str | int | float)}
    nested = {key: manifest[key] for key in ("versions", "hardware") if isinstance(manifest.get(key), dict)}
    return {
        "id": manifest["wandb_run_id"],
        "project": options["wandb_project"],
        "group": options["wandb_group"] or config["experiment"],
        "tags": list(options["wandb_tags"]),
        "name": "-".join(parts) + f"-s{config['seed']}",
        "config": flatten(config) | {"bandwidth.label": label} | flatten({"manifest": facts, **nested}),
    }


def open_run(run_dir: Path, mode: str, folder: Path, finish_timeout_s: float) -> Any:
    """Open the folder's run in W&B; its files go to ``folder``. mode: ``online`` continues what the server has.

    Errors: ``UserError`` without a key; whatever ``wandb`` raises, a server that does not answer included.
    """
    import wandb

    if mode == "online":
        require_key()
    known = wandb.Settings.model_fields  # the settings differ between releases
    wanted: dict[str, Any] = {
        "silent": True,
        "console": "off",
        "init_timeout": INIT_TIMEOUT_S,
        "finish_timeout": finish_timeout_s,
        "finish_timeout_raises": True,
        "x_service_wait": INIT_TIMEOUT_S,
        "x_disable_stats": True,  # sampling the machine would take time from the ranks
        "x_disable_meta": True,  # manifest.json has it
        "x_save_requirements": False,
        "disable_git": True,
        "disable_code": True,
    }
    settings = wandb.Settings(**{key: value for key, value in wanted.items() if key in known})
    wandb.setup(settings=settings)
    logging.getLogger("wandb").setLevel(logging.ERROR)
    resume = "allow" if mode == "online" else None
    run = wandb.init(mode=mode, dir=folder, resume=resume, settings=settings, **describe_run(run_dir))
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


class RunFeed:
    """Passes a folder's rows on to its run: each once, and none that the server has already."""

    def __init__(self, run: Any, run_dir: Path) -> None:
        self._run, self._first_step = run, run.starting_step
        self._rows, self._layers = RowReader(run_dir / "metrics.jsonl"), RowReader(run_dir / "layers.jsonl")
        self._layers_by_step: dict[int, list[Row]] = defaultdict(list)
        self._train_time_s = 0.0

    def log_new(self) -> int:
        """Log what the files gained since the last call; returns how many rows were sent."""
        rows, sent = self._rows.read_new(), 0
        for layer in self._layers.read_new():  # after the rows: a step's layers are written before its row
            self._layers_by_step[layer["step"]].append(layer)
        for row in rows:
            layers = self._layers_by_step.pop(row["step"], [])
            self._train_time_s += (row.get("iteration_ms") or 0.0) / 1e3
            if row["step"] >= self._first_step:
                record = row | {"train_time_s": self._train_time_s} | summarise_layers(layers)
                self._run.log({key: value for key, value in record.items() if value is not None}, step=row["step"])
                sent += 1
        return sent


def summarise_layers(layers: Sequence[Row]) -> dict[str, Any]:
    """A step's layers as W&B shows them: ``layers/<layer>/<key>``, and ``histograms/<key>`` over the layers."""
    import wandb

    record = {f"layers/{layer['layer']}/{key}": layer.get(key) for layer in layers for key in LAYER_KEYS}
    for key in HISTOGRAM_KEYS:
        values = [layer[key] for layer in layers if layer.get(key) is not None]
        if values:
            record[f"histograms/{key}"] = wandb.Histogram(values, num_bins=HISTOGRAM_BINS)
    return record


def close_run(run: Any, run_dir: Path) -> str:
    """Add the headline numbers, end the run, return its status. Errors: ``TimeoutError`` when data is left."""
    summary = read_summary(run_dir)
    run.summary.update({key: value for key, value in summary.items() if value is not None})
    run.finish(exit_code=0 if summary["status"] == "done" else 1)
    return summary["status"]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """``summary.json``; status ``unfinished`` while there is none (the run was killed, or goes on)."""
    try:
        return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"status": "unfinished"}
