"""Recorded runs and cells, found under any folders and checked: what everything else here starts from.

A run is a folder (config.yaml, manifest.json, metrics.jsonl, summary.json) or what :mod:`analysis.keep` made of one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.records.cells import Cell, load_cell
from tagc.config import flatten
from tagc.errors import UserError
from tagc.record.arm import label_arm
from tagc.record.columns import thinned
from tagc.record.manifest import SCHEMA_VERSION
from tagc.record.rows import load_rows

BINS = 50  # about as many points as a curve in a figure needs
SKIPPED = {"checkpoints", "earlier", "wandb", "profile", ".hydra", ".git", ".venv", "__pycache__"}
#: columns of a row by how several rows become one; a column in none of them is not kept
MEANS, MEDIANS, LASTS = thinned("mean"), thinned("median"), thinned("last")
#: of a configuration, without which a run cannot be compared
NEEDED_KEYS = ("compressor.name", "seed", "cluster.ranks", "model.name", "data.name", "trainer.max_steps")


@dataclass(frozen=True)
class Run:
    """One run. config: flat keys; rows: thinned, see :func:`thin_rows`; problems: what a reader must know about it."""

    name: str
    config: dict[str, Any]
    manifest: dict[str, Any]
    summary: dict[str, Any]
    rows: pd.DataFrame = field(repr=False)
    problems: tuple[str, ...] = ()

    @property
    def arm(self) -> str:
        """Its method and settings as they were named when it ran; for runs that did not record it, as of today."""
        return self.manifest.get("arm") or label_arm(self.config)

    @property
    def is_done(self) -> bool:
        """Whether it ended by itself, with all its steps."""
        return self.summary.get("status") == "done" and self.steps >= self.config["trainer.max_steps"]

    @property
    def steps(self) -> int:
        """The last recorded step."""
        return int(self.rows["step"].iloc[-1]) if len(self.rows) else 0

    @property
    def val_curve(self) -> pd.DataFrame:
        """``step`` and ``val_loss`` of every validation that gave a number."""
        return self.rows.reindex(columns=["step", "val_loss"]).dropna()

    @property
    def final_loss(self) -> float:
        """Validation loss after the last step; NaN if none was measured then, or it diverged."""
        curve = self.val_curve
        is_last = len(curve) and curve["step"].iloc[-1] == self.steps
        return float(curve["val_loss"].iloc[-1]) if is_last else math.nan

    @property
    def schema_version(self) -> int:
        """Of the record's layout; 1 is also that of records from before the number was written."""
        return self.manifest.get("schema_version", 1)


@dataclass
class Recorded:
    """All that was found. modelled: iteration times; modelled_crossovers: likewise.

    left_out: (where, why), of what is no fault; damaged: (where, why), of what cannot be read.
    """

    runs: list[Run] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    modelled: pd.DataFrame = field(default_factory=pd.DataFrame)
    modelled_crossovers: pd.DataFrame = field(default_factory=pd.DataFrame)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)

    def to_frame(self) -> pd.DataFrame:
        """All runs' rows in one tidy frame: the columns of ``rows`` behind run, compressor, seed, ranks and model."""
        keys = {"compressor": "compressor.name", "seed": "seed", "ranks": "cluster.ranks", "model": "model.name"}
        frames = [
            run.rows.assign(run=run.name, **{column: run.config[key] for column, key in keys.items()})
            for run in self.runs
        ]
        frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["run", *keys])
        return frame[["run", *keys, *(column for column in frame if column not in ("run", *keys))]]


def load_recorded(paths: Iterable[Path | str], skip_damaged: bool = False) -> Recorded:
    """Everything that was recorded under these folders, in the order of their names.

    skip_damaged: what cannot be read goes to ``damaged`` and the rest is loaded.
    Errors: ``UserError`` naming the file (and the line) for what is damaged, or the folders if they hold nothing.
    """
    folders, found = [Path(path) for path in paths], Recorded()
    modelled: list[pd.DataFrame] = []
    for path in folders:
        if not path.is_dir():
            raise UserError(f"{path} is no folder; name folders that hold recorded runs or rows")
        for where, add in _find_records(path, found, modelled):
            try:
                add()
            except UserError as error:
                if not skip_damaged:
                    raise
                found.damaged.append((where, str(error)))
    found.cells.sort(key=_order_cell)
    times, crossovers = ([f for f in modelled if ("rate_gbps" in f) is flag] for flag in (True, False))
    found.modelled = pd.concat(times, ignore_index=True) if times else pd.DataFrame()
    found.modelled_crossovers = pd.concat(crossovers, ignore_index=True) if crossovers else pd.DataFrame()
    if not (found.runs or found.cells or modelled or found.left_out or found.damaged):
        raise UserError(f"{', '.join(map(str, folders))}: no recorded run or row; name other folders")
    return found


def _find_records(
    path: Path, found: Recorded, modelled: list[pd.DataFrame]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The name of each run, cell or table of modelled rows below the folder, and what adds it to those found."""
    for folder, files in _walk(path):
        name = _name_run(folder, folder.relative_to(path))
        if {"config.yaml", "metrics.jsonl"} <= files:
            yield name, partial(_add_folder, found, folder, name)
        elif {"config.yaml", "manifest.json"} <= files:
            found.left_out.append((name, "it ended before its first step"))
        else:
            for file in (folder / name for name in sorted(files)):
                if file.suffix == ".json" and file.with_suffix(".csv").name in files:
                    yield file.stem, partial(_add_pair, found, file)
                elif file.suffix == ".csv":
                    yield file.name, partial(_add_modelled, modelled, file)


def _order_cell(cell: Cell) -> tuple[str, str, float]:
    """By network and setting, slow links first."""
    rate = cell.shared["link"]["rate_mbps"]
    return cell.shared["cell"]["network"], cell.shared["setting"], math.inf if rate is None else rate


def _walk(root: Path) -> Iterator[tuple[Path, set[str]]]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)
        yield Path(folder), set(files)


def _is_readable(found: Recorded, name: str, schema_version: int) -> bool:
    if schema_version != SCHEMA_VERSION:
        found.left_out.append((name, f"schema version {schema_version}; this version reads {SCHEMA_VERSION}"))
    return schema_version == SCHEMA_VERSION


def _add_run(found: Recorded, run: Run) -> None:
    if _is_readable(found, run.name, run.schema_version):
        found.runs.append(run)


def _add_folder(found: Recorded, folder: Path, name: str) -> None:
    _add_run(found, load_folder(folder, name))


def _add_pair(found: Recorded, path: Path) -> None:
    shared = _load_json(path)
    if "cell" in shared:
        if _is_readable(found, path.stem, shared.get("schema_version", 1)):
            found.cells.append(load_cell(path))
    elif shared.get("kind") == "run":
        _add_run(found, load_kept(path, shared))


def _add_modelled(modelled: list[pd.DataFrame], path: Path) -> None:
    """A table of modelled rows; any other CSV is none of ours."""
    with path.open(encoding="utf-8") as file:
        if not file.readline().startswith("kind,workload,"):
            return
    frame = pd.read_csv(path)
    if set(frame["kind"]) != {"modelled"}:
        raise UserError(f"{path}: its column `kind` holds {sorted(set(frame['kind']))}, not only `modelled`")
    modelled.append(frame)


def _load_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it or take the folder away") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds no JSON object; restore it or take the folder away")
    return loaded


def load_folder(folder: Path, name: Path | str | None = None) -> Run:
    """A run folder. Without summary.json it counts as unfinished; a torn last row is left out and told.

    Errors: ``UserError`` naming the file, and the line of a bad row.
    """
    path = folder / "metrics.jsonl"
    try:
        config = flatten(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        is_torn = not path.read_bytes().endswith(b"\n")
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise UserError(
            f"{folder}: config.yaml cannot be read ({error}); restore it or take the folder away"
        ) from error
    rows = load_rows(path)
    _check_steps(path, rows)
    manifest = _drop_nulls(_load_json(folder / "manifest.json"))
    has_summary = (folder / "summary.json").exists()
    summary = _load_json(folder / "summary.json") if has_summary else {"status": "unfinished"}
    problems = ("a torn last row was left out",) if is_torn and rows else ()
    _check_config(folder / "config.yaml", config)
    try:
        thin = thin_rows(rows, config["trainer.max_steps"])
    except ValueError as error:
        raise UserError(f"{path}: text in place of a number ({error}); repair the file") from error
    return Run(_name_run(folder, name), config, manifest, summary, thin, problems)


def _name_run(folder: Path, name: Path | str | None) -> str:
    return folder.name if name in (None, Path(".")) else str(name)


def _drop_nulls(manifest: dict[str, Any]) -> dict[str, Any]:
    """What is unknown is absent."""
    return {key: value for key, value in manifest.items() if value is not None}


def _check_config(path: Path, config: dict[str, Any]) -> None:
    missing = [key for key in NEEDED_KEYS if config.get(key) is None]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; restore it or take the run away")
    for key in ("seed", "cluster.ranks", "trainer.max_steps"):
        if not isinstance(config[key], int):
            raise UserError(f"{path}: {key}={config[key]!r} is no whole number; restore it or take the run away")


def _check_steps(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    before = 0
    for number, row in enumerate(rows, start=1):
        step = row.get("step")
        if not isinstance(step, int) or step <= before:
            raise UserError(f"{path}, line {number}: step {step!r} after {before}; steps must rise, repair the file")
        before = step


def load_kept(path: Path, shared: dict[str, Any] | None = None) -> Run:
    """A run as :mod:`analysis.keep` keeps it: ``path`` (``.json``) and its rows beside it (``.csv``).

    Errors: ``UserError`` naming the file.
    """
    shared = _load_json(path) if shared is None else shared
    missing = {"config", "manifest", "summary"} - set(shared)
    if missing:
        raise UserError(f"{path}: lacks {', '.join(sorted(missing))}; keep the run again")
    try:
        rows = pd.read_csv(path.with_suffix(".csv"))
        _check_steps(path.with_suffix(".csv"), [{"step": int(step)} for step in rows["step"]])
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path.with_suffix('.csv')} cannot be read ({error}); keep the run again") from error
    _check_config(path, shared["config"])
    return Run(path.stem, shared["config"], _drop_nulls(shared["manifest"]), shared["summary"], rows)


def thin_rows(rows: Sequence[dict[str, Any]], max_steps: int) -> pd.DataFrame:
    """About ``BINS`` rows in place of one per step; ``steps`` says how many each stands for.

    A bin ends at every validation, so ``val_loss`` is exact at its ``step``. Losses, bytes and shares are means over
    the bin, times medians, ``time_dilation`` the last. Rows under a profiler or diagnostic give no times.
    """
    if not rows:
        return pd.DataFrame(columns=["step", "steps"])
    frame = pd.DataFrame(list(rows)).reindex(columns=[*LASTS, *MEANS, *MEDIANS, "profiled"])
    is_disturbed = frame["profiled"].notna() | frame["fidelity_cosine"].notna()
    frame.loc[is_disturbed, list(MEDIANS)] = None
    numbers = frame.drop(columns="profiled").astype(float)
    every = max(1, max_steps // BINS)
    ends = (numbers["step"] % every == 0) | numbers["val_loss"].notna()
    bins = numbers.groupby(ends.shift(fill_value=False).cumsum())
    thin = bins.agg(
        {**dict.fromkeys(LASTS, "last"), **dict.fromkeys(MEANS, "mean"), **dict.fromkeys(MEDIANS, "median")}
    )
    thin.insert(1, "steps", bins.size())
    return thin.astype({"step": int}).dropna(axis="columns", how="all").reset_index(drop=True)
