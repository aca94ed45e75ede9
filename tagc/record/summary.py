"""From the rows of a run to its headline numbers. Pure: no file is read or written but by :func:`load_summary`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tagc.config import Config
from tagc.errors import UserError
from tagc.record.columns import STEP_COLUMNS, Column


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if _is_number(row.get(key))]


def _is_timed(row: dict[str, Any]) -> bool:
    return not {"fidelity_cosine", "profiled", "resumed"} & row.keys() and row.get("time_dilation", 1.0) is not None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _mean_of_last(rows: Sequence[dict[str, Any]], key: str, count: int) -> float | None:
    """Mean over the last rows; None when one of them holds no number, so that a NaN is not averaged away."""
    values = [row[key] for row in rows[-count:] if key in row]
    return _mean(values) if values and all(_is_number(value) for value in values) else None


class _Numbers:
    """Values of a column: of all rows, of those whose time counts, and of those whose bytes and shares count."""

    def __init__(self, rows: Sequence[dict[str, Any]], warmup_steps: int) -> None:
        self.rows = rows
        self.timed = [row for row in rows[warmup_steps:] if _is_timed(row)]
        self.counted = self.timed or rows  # bytes and shares need no warm-up, so a very short run still has them

    def percentile(self, key: str, percent: float) -> float | None:
        return _percentile(_numbers(self.timed, key), percent)

    def mean(self, key: str) -> float | None:
        # fidelity is measured only in steps whose time does not count
        return _mean(_numbers(self.counted, key) or _numbers(self.rows, key))

    def per_second(self, key: str) -> float | None:
        count, iteration_ms = self.percentile(key, 50), self.percentile("iteration_ms", 50)
        return 1e3 * count / iteration_ms if count is not None and iteration_ms else None

    def last_number(self, key: str) -> float | None:
        return next((row[key] for row in reversed(self.rows) if _is_number(row.get(key))), None)


#: statistic of a column (:data:`tagc.record.columns.STATISTICS`) -> its numbers, in the order of its names
_COMPUTE: dict[str, Callable[[_Numbers, str], tuple[float | None, ...]]] = {
    "spread": lambda numbers, key: tuple(numbers.percentile(key, percent) for percent in (50, 20, 80)),
    "median": lambda numbers, key: (numbers.percentile(key, 50),),
    "rate": lambda numbers, key: (numbers.per_second(key),),
    "per_step": lambda numbers, key: (numbers.mean(key),),
    "mean": lambda numbers, key: (numbers.mean(key),),
    "loss": lambda numbers, key: tuple(_mean_of_last(numbers.rows, key, count) for count in (1, 10)),
    "last_number": lambda numbers, key: (numbers.last_number(key),),
    "last": lambda numbers, key: (numbers.rows[-1].get(key) if numbers.rows else None,),
}


def _summarise_column(column: Column, numbers: _Numbers) -> dict[str, float | None]:
    return dict(zip(column.summary_names, _COMPUTE[column.summary](numbers, column.name), strict=True))


def summarise(rows: Sequence[dict[str, Any]], config: Config, finished_steps: int = 0) -> dict[str, Any]:
    """The numbers of ``summary.json`` without ``status``: the run's settings, and the declared columns' statistics.

    Left out of every time, byte count and share: the first ``trainer.timing_warmup_steps`` rows, as many after each
    restart (``resumed``), rows with a fidelity diagnostic (it runs without overlap) or under the profiler, and rows
    before the link was capped (``network.time_dilation=auto`` measures in them); ``timed_steps`` says how many are
    left. Which statistic a column gets, and under which names, :mod:`tagc.record.columns` says. A number that no row
    holds is ``None``. ``steps`` is the last row's step, or ``finished_steps`` if the rows of the last steps were lost;
    ``missing_rows`` says how many steps have no row.

    Example: three rows of 10, 20 and 30 ms after the warm-up give a median of 20, _p20 of 14 and _p80 of 26.
    """
    steps = max(finished_steps, rows[-1].get("step", len(rows)) if rows else 0)
    numbers = _Numbers(rows, config.trainer.timing_warmup_steps)
    summary: dict[str, Any] = {
        "experiment": config.experiment,
        "compressor": config.compressor.name,
        "bandwidth": config.bandwidth.label,
        "rate_mbps": config.bandwidth.rate_mbps,
        "network": config.network.name,
        "reference_gpu": config.network.reference_gpu if config.network.time_dilation == "auto" else None,
        "ranks": config.cluster.ranks,
        "model": config.model.name,
        "seed": config.seed,
        "steps": steps,
        "missing_rows": steps - len(rows),
        "timed_steps": len(numbers.timed),
    }
    for column in STEP_COLUMNS:
        if column.summary:
            summary |= _summarise_column(column, numbers)
    return summary


def load_summary(run_dir: Path) -> dict[str, Any]:
    """``summary.json`` of a run folder, with the folder itself as ``run_dir`` (for :func:`tagc.record.print_table`).

    Errors: ``UserError`` naming the file when it is missing (the run did not end) or damaged.
    """
    path = Path(run_dir) / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): the run did not end; see log.txt there") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); run again, or rebuild it from metrics.jsonl") from error
    return {**summary, "run_dir": str(run_dir)}
