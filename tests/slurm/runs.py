"""What the runs of this folder's tests are, and what they have recorded so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.comm.harness import VOCAB

ROOT = Path(__file__).parents[2]
STEPS = 14
SETTINGS = (
    *("model.layers=1", "model.width=48", "model.heads=3", "model.context=16", "compressor.min_numel=512"),
    *("data=bin", f"data.vocab_size={VOCAB}", "logging.wandb=disabled", "kernels=reference"),
    *(f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=0", "trainer.eval_every=1000"),
    *("network.latency_ms=30", "network.time_dilation=1"),  # a run takes a while, and the cores are free meanwhile
)


def load_rows(run_dir: Path | None) -> list[dict[str, Any]]:
    """The complete rows of a run; none before it has begun."""
    path = run_dir / "metrics.jsonl" if run_dir else None
    lines = path.read_text().split("\n")[:-1] if path and path.exists() else []
    return [json.loads(line) for line in lines]


def find_point(sweep_dir: Path, tokens: str) -> Path | None:
    """The folder of the point of a sweep that trains on the tokens of this name, once it has begun."""
    for path in sweep_dir.glob("*/config.yaml"):
        if Path(yaml.safe_load(path.read_text())["data"]["path"]).name == tokens:
            return path.parent
    return None
