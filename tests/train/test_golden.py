"""Losses of 20 steps of every compressor, committed: a refactoring must not change a bit of them.

``python -m tests.train.test_golden`` records them anew, when a change of the numbers is meant.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tagc.config import COMPRESSORS
from tagc.data import DataInfo
from tagc.kernels import resolve_backend
from tests.distributed import run_ranks
from tests.train.harness import build_trainer, make_config, train_until, write_tokens

pytestmark = pytest.mark.distributed

GOLDEN = Path(__file__).with_name("golden_losses.json")
STEPS, RANKS = 20, 2
BACKENDS = ("reference", "cpu")


def describe_machine() -> dict[str, str]:
    """What decides the last bit of a matrix product: where this differs, so may the losses."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": model, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def train_every_case(rank: int, data: DataInfo) -> dict[str, list[float]]:
    """Losses by ``COMPRESSOR BACKEND``. Steps 0 to 3 are sent dense by those that can, so both ways are covered."""
    losses = {}
    for name in COMPRESSORS:
        for backend in BACKENDS[:1] if name in ("noop", "fsdp", "bf16") else BACKENDS:  # these call no kernel
            config = make_config(name, RANKS, max_steps=STEPS)
            config.compressor.warmup_steps = 4
            trainer = build_trainer(config, data, resolve_backend(backend)[1])
            losses[f"{name} {backend}"] = [row["train_loss"] for row in train_until(trainer, STEPS)]
    return losses


def measure_losses(folder: Path) -> dict[str, list[float]]:
    """All cases with one start of the ranks; every rank records the same losses."""
    results = run_ranks(train_every_case, RANKS, write_tokens(folder), timeout_s=300)
    assert results[0] == results[1]
    return results[0]


def test_losses_are_the_recorded_ones(tmp_path: Path) -> None:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())
    losses = measure_losses(tmp_path)
    assert losses.keys() == golden["losses"].keys()
    assert all(len(recorded) == STEPS for recorded in golden["losses"].values())
    is_same_machine = describe_machine() == golden["machine"]
    for case, recorded in golden["losses"].items():
        expected = [float(text) for text in recorded]
        assert losses[case] == (expected if is_same_machine else pytest.approx(expected, rel=1e-4)), case


def main() -> None:
    """Record the losses of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        losses = measure_losses(Path(folder))
    golden = {"machine": describe_machine(), "losses": {c: [repr(x) for x in found] for c, found in losses.items()}}
    text = json.dumps(golden, indent=1).replace('",\n   "', '", "').replace("[\n   ", "[").replace("\n  ]", "]")
    GOLDEN.write_text(text + "\n")


if __name__ == "__main__":
    main()
