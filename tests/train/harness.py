"""Trainers of a tiny model on real ranks, and what of them must be equal after a restart."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tagc.config import COMPRESSORS, Config, DataConfig
from tagc.data import DataInfo, prepare
from tagc.kernels import resolve_backend
from tagc.record import NullRecorder
from tagc.train.checkpoint import Checkpoints
from tagc.train.profile import StepProfiler
from tagc.train.trainer import Trainer
from tests.comm.harness import VOCAB, tiny_config

CASES = (*COMPRESSORS, "lhc overloaded", "tied")


class Rows(NullRecorder):
    """Keeps the rows in memory."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def step(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def write_tokens(folder: Path) -> DataInfo:
    """Token files of noise, checked as the launcher does it."""
    generator = np.random.default_rng(0)
    for name, count in (("train", 20_000), ("val", 2_000)):
        generator.integers(VOCAB, size=count).astype(np.uint16).tofile(folder / f"{name}.bin")
    return prepare(DataConfig(name="bin", path=str(folder), vocab_size=VOCAB))


def make_config(case: str, ranks: int = 2, **trainer: Any) -> Config:
    """One of CASES: a compressor, or a setting with state of its own."""
    options: dict[str, dict[str, Any]] = {
        "lhc": {"sparsity": 0.0, "ratio": 0.5, "layers": "all"},
        "lhc overloaded": {"sparsity": 0.0},  # finds out at its first step, and goes dense
        "tagc2": {"value_dtype": "bfloat16", "adaptive_ratio": True, "sparsity": 0.5},  # an embedding's sketch shrinks
        "packed": {"capacity_slack": 1.0, "residual_dtype": "bfloat16"},
    }
    name = {"tied": "tagc"}.get(case, case.split()[0])
    config = tiny_config(name, ranks, **options.get(case, {}))
    config.model.tie_weights, config.model.dropout = case == "tied", 0.1
    config.logging.fidelity_every = 0
    config.data.vocab_size = VOCAB
    config.trainer.max_steps = 6
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    return config


def build_trainer(config: Config, data: DataInfo, kernels: ModuleType | None = None) -> Trainer:
    """A trainer as the worker builds it, on the reference backend unless given another one."""
    return Trainer(config, data, torch.device("cpu"), kernels or resolve_backend("reference")[1])


def train_until(trainer: Trainer, step: int, checkpoints: Checkpoints | None = None) -> list[dict[str, Any]]:
    """The rows of the steps up to ``step``; saves after the last one if there is a place."""
    rows = Rows()
    trainer.stop_requested = lambda: trainer.step + 1 >= step
    profiler = StepProfiler(trainer.config.trainer, Path(), trainer.device)  # off
    trainer.train(rows, profiler, checkpoints)
    return rows.rows


def fingerprint(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's parameters, moments and whole compressor state."""
    state = {f"parameter {name}": p.to_local().clone() for name, p in trainer.model.named_parameters()}  # type: ignore
    for i, moments in enumerate(trainer.optimizer.state.values()):
        state |= {f"{key} {i}": v.to_local().clone() for key, v in moments.items() if key != "step"}
    for bucket in trainer.sync.buckets:
        for slot in bucket.slots:
            compressor = slot.compressor
            state |= {f"{compressor.spec.name} {k}": v.clone() for k, v in compressor.state_dict().items()}
    return state
