"""A small run's configuration, rows as the training loop writes them, and a clean logger for every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tagc.config import Config
from tagc.record import close_logging


@pytest.fixture(autouse=True)
def clean_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_DISABLED"):
        monkeypatch.delenv(key, raising=False)
    yield
    close_logging()


@pytest.fixture
def config() -> Config:
    config = Config()
    config.logging.wandb = "disabled"
    config.logging.console_every = 4
    config.trainer.max_steps = 10
    config.trainer.timing_warmup_steps = 2
    return config


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    def make(step: int, **changes: Any) -> dict[str, Any]:
        row = {
            "step": step,
            "train_loss": 8.0 - 0.1 * step,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            "tokens": 3000,
            "iteration_ms": 1000.0,
            "wire_bytes": 8_100_000,
            "grad_wire_bytes": 1_200_000,
        }
        return row | changes

    return make
