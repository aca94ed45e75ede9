"""``cluster.device``, on machines that this one need not be."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from tagc.errors import UserError
from tagc.host.device import count_cores, resolve_device


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


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/box/job\n", {"box/cpu.max": "150000 100000", "box/job/cpu.max": "max 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        (
            "4:cpu,cpuacct:/box\n2:memory:/\n",
            {"cpu/box/cpu.cfs_quota_us": "300000", "cpu/box/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("", {}, 8),
    ],
)
def test_a_containers_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    assert count_cores(tmp_path, tmp_path / "own") == cores
