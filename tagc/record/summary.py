"""From the rows of a run to its headline numbers. Pure: no file is read or written but by :func:`load_summary`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tagc.config import Config
from tagc.errors import UserError

TIME_KEYS = ("compute_ms", "encode_ms", "exchange_ms", "decode_ms", "gather_ms", "exposed_comm_ms")
CPU_TIME_KEYS = ("compute_cpu_ms", "encode_cpu_ms", "decode_cpu_ms")
BYTE_KEYS = (
    "wire_bytes",
    "grad_wire_bytes",
    "value_wire_bytes",
    "index_wire_bytes",
    "return_wire_bytes",
    "param_wire_bytes",
)
LINK_KEYS = ("link_sent_bytes", "link_received_bytes")  # what the interface counted, where it counts
MEAN_KEYS = ("achieved_sparsity", "union_density", "peeled_frac", "fidelity_cosine", "fidelity_rel_error")


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


def _mean_of_last_losses(rows: Sequence[dict[str, Any]], count: int = 10) -> float | None:
    """Mean training loss of the last rows; None when one of them diverged, so that a NaN is not averaged away."""
    losses = [row["train_loss"] for row in rows[-count:] if "train_loss" in row]
    return _mean(losses) if losses and all(_is_number(loss) for loss in losses) else None


def _tokens_per_s(timed: Sequence[dict[str, Any]]) -> float | None:
    tokens, iteration_ms = _percentile(_numbers(timed, "tokens"), 50), _percentile(_numbers(timed, "iteration_ms"), 50)
    return 1e3 * tokens / iteration_ms if tokens is not None and iteration_ms else None


def summarise(rows: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """The numbers of ``summary.json`` without ``status``.

    Left out of every time, byte count and share: the first ``trainer.timing_warmup_steps`` rows, as many after each
    restart (``resumed``), rows with a fidelity diagnostic (it runs without overlap) or under the profiler, and rows
    before the link was capped (``network.time_dilation=auto`` measures in them); ``timed_steps`` says how many are
    left. Times are medians over those (``iteration_ms`` and ``scaled_iteration_ms``, measured time over dilation, with
    the 20th and 80th percentile too), bytes and shares are means over those that have the key. ``time_dilation`` is the
    last row's. ``tokens_per_s`` is median tokens over median iteration time. ``train_loss`` is the last row's,
    ``train_loss_last10`` the mean of the last ten, ``val_loss`` the last one measured. What no row holds is ``None``.

    Example: three rows of 10, 20 and 30 ms after the warm-up give a median of 20, _p20 of 14 and _p80 of 26.
    """
    timed = [row for row in rows[config.trainer.timing_warmup_steps :] if _is_timed(row)]
    counted = timed or rows  # bytes and shares need no warm-up, so a very short run still has them
    val_losses = _numbers(rows, "val_loss")
    last_loss = rows[-1].get("train_loss") if rows else None
    summary: dict[str, Any] = {
        "experiment": config.experiment,
        "compressor": config.compressor.name,
        "bandwidth": config.bandwidth.label,
        "rate_mbps": config.bandwidth.rate_mbps,
        "network": config.network.name,
        "time_dilation": rows[-1].get("time_dilation") if rows else None,
        "reference_gpu": config.network.reference_gpu if config.network.time_dilation == "auto" else None,
        "ranks": config.cluster.ranks,
        "model": config.model.name,
        "seed": config.seed,
        "steps": len(rows),
        "timed_steps": len(timed),
    }
    for key in ("iteration_ms", "scaled_iteration_ms"):
        values = _numbers(timed, key)
        summary |= {
            f"{key}_{name}": _percentile(values, percent)
            for name, percent in (("median", 50), ("p20", 20), ("p80", 80))
        }
    summary |= {f"{key}_median": _percentile(_numbers(timed, key), 50) for key in TIME_KEYS + CPU_TIME_KEYS + LINK_KEYS}
    summary["tokens_per_s"] = _tokens_per_s(timed)
    summary |= {f"{key}_per_step": _mean(_numbers(counted, key)) for key in BYTE_KEYS}
    summary |= {
        "train_loss": last_loss if _is_number(last_loss) else None,
        "train_loss_last10": _mean_of_last_losses(rows),
        "val_loss": val_losses[-1] if val_losses else None,
    }
    return summary | {key: _mean(_numbers(counted, key)) for key in MEAN_KEYS}


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
