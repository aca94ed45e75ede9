"""What a restarted rank knows of the attempts before it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.signals import RESTART_VARIABLE
from tagc.launch import failures
from tagc.launch.attempts import Attempt, begin_attempt, find_user_error
from tagc.launch.failures import record_exception


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failures, "_LINGER_S", 0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv(RESTART_VARIABLE, "")

    def call(number: int) -> Attempt:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        return begin_attempt(str(tmp_path), Config())

    return call


def test_out_of_memory_halves_the_micro_batch(begin) -> None:
    sizes = []
    for number in range(3):
        attempt = begin(number)
        sizes.append((attempt.config.micro_batch, attempt.config.accumulation))
        record_exception(attempt.report_dir, 1, torch.OutOfMemoryError("CUDA out of memory"))
        record_exception(attempt.report_dir, 0, RuntimeError("gloo: connection closed"))
    assert sizes == [(12, 1), (6, 2), (3, 4)]
    assert "rank 1 failed: torch.OutOfMemoryError: CUDA out of memory" in os.environ[RESTART_VARIABLE]
    assert "trainer.micro_batch is now 3" in os.environ[RESTART_VARIABLE]


def test_bad_input_is_not_tried_again(begin, tmp_path: Path) -> None:
    first = begin(0)
    assert not first.is_pointless
    assert not begin(1).is_pointless
    assert "rank 0, 1 was killed, crashed or hung" in os.environ[RESTART_VARIABLE]
    record_exception(first.report_dir, 1, UserError("data.path=x is missing"))
    assert begin(1).is_pointless
    assert str(find_user_error(str(tmp_path))) == "data.path=x is missing"


def test_a_stop_ends_the_attempts(begin, tmp_path: Path) -> None:
    begin(0)
    (tmp_path / "stop").touch()
    assert begin(1).is_pointless
