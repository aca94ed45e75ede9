"""What was measured and goes into a prediction: evidence.json, made from the recorded rows.

    python -m experiments.cost_model.evidence     # writes it, the rows of its errors and their table in docs/predict.md

Nothing in it is typed by hand; a test makes it again and compares.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tagc.errors import UserError
from tagc.network.calibration import REFERENCE_GPUS, UTILISATION
from tagc.predict.inputs import CodecTimes

PATH = Path(__file__).with_name("evidence.json")
CPU = "cpu"
GPUS = (*REFERENCE_GPUS, CPU)


@dataclass(frozen=True)
class Loss:
    """Validation loss above that of ``fsdp`` after the same steps, as a share; the interval is of 95 %."""

    frac: float
    low: float | None
    high: float | None
    n: int
    setting: str

    def __str__(self) -> str:
        spread = "" if self.low is None else f"{self.low:+.2%} to {self.high:+.2%}, "
        return f"{self.frac:+.2%} ({spread}n = {self.n})"


@dataclass(frozen=True)
class Evidence:
    """See :func:`load_evidence`."""

    rows: dict[str, Any]

    @property
    def errors(self) -> dict[str, Any]:
        """Of predictions of measured cells that nothing was fitted to, as shares, and their range of validity."""
        return self.rows["errors"]

    def find_loss(self, compressor: str, weights: str, model: str, ranks: int) -> Loss | None:
        """The penalty of a method: in the nearest setting that was measured (model, then ranks); None if in none."""
        label = compressor if weights == "full" else f"{compressor} weights={weights}"
        rows = [row for row in self.rows["losses"] if row["method"] == label]
        if not rows:
            return None
        best = max(rows, key=lambda row: (row["model"] == model, row["ranks"] == ranks, row["n"]))
        return Loss(*(best[key] for key in ("frac", "low", "high", "n", "setting")))

    def find_codec(self, compressor: str, weights: str) -> CodecTimes:
        """Codec times on the CPU; of weights those of delta4, whatever the bits. Errors: ``UserError`` if not timed."""
        if compressor not in self.rows["codec"]:
            raise UserError(f"compressor={compressor} was not timed; there are {', '.join(self.rows['codec'])}")
        weights_ns = 0.0 if weights in ("full", "bf16") else self.rows["weights_ns_per_element"]
        return CodecTimes(**self.rows["codec"][compressor], weights_ns_per_element=weights_ns)

    def compute_s(self, gpu: str, flops: float, dtype: str) -> float:
        """Seconds of computation: measured per FLOP on the CPU, assumed utilisation of the peak of a GPU."""
        if gpu == CPU:
            return flops * self.rows["cpu_s_per_flop"][dtype]
        peak = REFERENCE_GPUS[gpu]
        return flops / ((peak.bfloat16 if dtype == "bfloat16" else peak.tf32) * UTILISATION)

    def codec_slowdown(self, gpu: str) -> float:
        """Factor on codec times: they are taken to shrink as fp32 computation does, for no GPU was timed."""
        return self.compute_s(gpu, 1.0, "float32") / self.compute_s(CPU, 1.0, "float32")


@cache
def load_evidence() -> Evidence:
    """The committed evidence."""
    return Evidence(json.loads(PATH.read_text(encoding="utf-8")))
