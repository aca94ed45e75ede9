"""A run that continues a checkpoint is the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tagc.data import DataInfo
from tagc.train.checkpoint import Checkpoints
from tests.distributed import run_ranks
from tests.train.harness import CASES, build_trainer, fingerprint, make_config, train_until, write_tokens

pytestmark = pytest.mark.distributed
TIMES = {"iteration_ms", "compute_ms", "encode_ms", "exchange_ms", "gather_ms", "decode_ms", "exposed_comm_ms"}


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES | {"checkpoint_ms"}} for row in rows]


def continue_every_case(rank: int, data: DataInfo, folder: str) -> list[str]:
    """6 steps against 3, a checkpoint, and 3 by a fresh trainer; returns what differs."""
    differences = []
    for case in CASES:
        config = make_config(case)
        whole = build_trainer(config, data)
        expected = train_until(whole, 6)
        with Checkpoints(Path(folder, case), config) as checkpoints:
            rows = train_until(build_trainer(config, data), 3, checkpoints)
            checkpoints.wait()
            fresh = build_trainer(config, data)
            assert checkpoints.restore_newest(fresh) == 3
            rows += train_until(fresh, 6)
        if without_times(rows) != without_times(expected):
            differences.append(f"{case}: rows")
        left, right = fingerprint(fresh), fingerprint(whole)
        assert left.keys() == right.keys()
        differences += [f"{case}: {name}" for name in left if not torch.equal(left[name], right[name])]
    return differences


def test_every_compressor_continues_bitwise(tmp_path: Path) -> None:
    assert run_ranks(continue_every_case, 2, write_tokens(tmp_path), str(tmp_path)) == [[], []]
