"""Small run folders, written by the recorder itself, and a quiet logger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tagc.config import Config, flatten, to_dict
from tagc.record import Recorder, build_manifest, close_logging
from tagc.record.arm import label_arm

STEPS = 20
#: compressor -> (ms per step, factor on the loss, value, index bytes)
ARMS = {
    "fsdp": (1000.0, 1.0, 6_000_000, 0),
    "bf16": (900.0, 1.0, 3_000_000, 0),
    "tagc2": (800.0, 1.005, 2_000_000, 170_000),
}
MANIFEST = {
    "git_commit": "0123456789abcdef",
    "git_dirty": False,
    "started_at": "2026-12-01T00:00:00+00:00",
    "data": {"fingerprint": "f" * 64, "vocab_size": 4096, "train_files": ["/somewhere/train.bin"]},
    "threads_per_rank": 1,
    "hardware": {"cpu_model": "test CPU", "cpu_cores_usable": 2, "gpus": []},
}


@cache
def describe_machine() -> dict[str, Any]:
    """A real manifest; it asks git and pip, so once is enough."""
    return build_manifest(make_config("fsdp", 0), kernels="cpu", device="cpu")


def loss_at(step: int, seed: int, factor: float) -> float:
    return (4 + 4 / step + 0.01 * seed) * factor


def make_config(compressor: str, seed: int, **keys: Any) -> Config:
    """keys: of the configuration, ``trainer__max_steps=20`` for ``trainer.max_steps``."""
    config = Config()
    config.compressor.name, config.seed, config.logging.wandb = compressor, seed, "disabled"
    config.trainer.max_steps, config.trainer.eval_every, config.network.name = STEPS, 5, "paced"
    config.bandwidth.rate_mbps, config.network.time_dilation = 100.0, 1.0
    for key, value in keys.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def write_run(
    folder: Path,
    compressor: str,
    seed: int = 0,
    manifest: dict[str, Any] | None = None,
    steps: int = STEPS,
    **keys: Any,
) -> Path:
    """A run of ``steps`` steps; ``status`` is done if these are all."""
    config = make_config(compressor, seed, **keys)
    ms, factor, value_bytes, index_bytes = ARMS[compressor]
    is_sketch = compressor == "tagc2"
    record = (
        describe_machine() | MANIFEST | {"seed": seed, "arm": label_arm(flatten(to_dict(config)))} | (manifest or {})
    )
    with Recorder(folder, config, record) as recorder:
        for step in range(1, steps + 1):
            loss = loss_at(step, seed, factor)
            row = {
                "step": step,
                "train_loss": loss - 0.1,
                "tokens": 3072,
                "iteration_ms": ms + math.sin(step),
                "time_dilation": 1.0,
                "scaled_iteration_ms": ms + math.sin(step),
                "value_wire_bytes": value_bytes,
                "index_wire_bytes": index_bytes,
                "return_wire_bytes": 0,
                "grad_wire_bytes": value_bytes + index_bytes,
                "param_wire_bytes": 10_000_000,
                "wire_bytes": value_bytes + index_bytes + 10_000_000,
                "achieved_sparsity": 0.82 if is_sketch else None,
                "union_density": 0.3 if is_sketch else None,
                "peeled_frac": 1.0 if is_sketch else None,
            }
            recorder.step(row | ({"val_loss": loss} if step % 5 == 0 else {}))
        recorder.finish("done" if steps >= config.trainer.max_steps else "interrupted")
    return folder


@pytest.fixture(autouse=True)
def clean_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(key, raising=False)
    yield
    close_logging()


@pytest.fixture(name="write_run")
def fixture_write_run() -> Callable[..., Path]:
    return write_run


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, three seeds, one setting; to be read only."""
    folder = tmp_path_factory.mktemp("study")
    for compressor in ARMS:
        for seed in range(3):
            write_run(folder / f"{compressor}-{seed}", compressor, seed)
    close_logging()
    return folder
