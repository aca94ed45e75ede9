"""``cluster.device``, on machines that this one need not be."""

from __future__ import annotations

import logging

import pytest
import torch

from tagc.errors import UserError
from tagc.host.device import resolve_device


def _pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("device", "gpus", "ranks", "expected"),
    [
        ("cpu", 2, 2, "cpu"),
        ("auto", 0, 2, "cpu"),
        ("auto", 2, 2, "cuda"),
        ("auto", 1, 2, "cpu"),
        ("cuda", 4, 2, "cuda"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, ranks: int, expected: str) -> None:
    _pretend_gpus(monkeypatch, gpus)
    assert resolve_device(device, ranks) == expected


def test_auto_says_why_it_leaves_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr(logging.getLogger("tagc"), "propagate", True)
    resolve_device("auto", 2)
    assert "1 GPU(s) for cluster.ranks=2" in caplog.text


@pytest.mark.parametrize(
    ("gpus", "ranks", "message"),
    [(0, 1, "cluster.device=cuda, but .* set cluster.device=cpu"), (1, 2, "cluster.ranks=2 .* 1 can be seen")],
)
def test_cuda_that_cannot_serve_all_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, message: str
) -> None:
    _pretend_gpus(monkeypatch, gpus)
    with pytest.raises(UserError, match=message):
        resolve_device("cuda", ranks)
