"""What the launcher decides before any rank starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tagc.config import Config, to_dict
from tagc.errors import UserError
from tagc.train.checkpoint_files import CheckpointInfo, dilation_to_keep, list_checkpoints, step_dir
from tagc.train.resume import prepare_start


def leave_run(run_dir: Path, config: Config, step: int, status: str = "failed") -> None:
    """A run folder with one checkpoint, as far as the launcher looks."""
    folder = step_dir(run_dir, step)
    folder.mkdir(parents=True)
    info = CheckpointInfo(step, config.cluster.ranks, torch.__version__, to_dict(config), {}, {})
    (folder / "checkpoint.json").write_text(json.dumps(asdict(info)))
    (run_dir / "summary.json").write_text(json.dumps({"status": status, "steps": step}))


@pytest.mark.parametrize(
    ("resume", "step", "status", "continues"),
    [
        ("auto", 10, "failed", True),
        ("auto", 10, "done", True),  # fewer steps than are wanted now
        ("auto", 100, "done", False),
        ("auto", 100, "interrupted", True),
        ("never", 10, "failed", False),
        ("must", 10, "interrupted", True),
    ],
)
def test_what_is_continued_and_what_set_aside(tmp_path: Path, resume, step, status, continues) -> None:
    config = Config()
    config.trainer.resume = resume
    leave_run(tmp_path, config, step, status)
    config.cluster.ranks, config.trainer.micro_batch, config.logging.console_every = 4, 2, 1
    prepare_start(tmp_path, config)
    assert len(list_checkpoints(tmp_path)) == continues
    assert (tmp_path / "earlier" / "1" / "checkpoints").exists() is not continues
    assert not (tmp_path / "summary.json").exists()  # nobody takes the old status for this run's


def test_another_configuration_is_refused_with_the_keys(tmp_path: Path) -> None:
    config = Config()
    leave_run(tmp_path, config, 10)
    config.model.width, config.compressor.sparsity, config.trainer.eval_every = 96, 0.9, 1
    with pytest.raises(UserError) as refused:
        prepare_start(tmp_path, config)
    for part in ("model.width=96, 192 in", "compressor.sparsity=0.9, 0.8 in", "trainer.resume=never", "hydra.run.dir"):
        assert part in str(refused.value)
    assert "eval_every" not in str(refused.value) and len(list_checkpoints(tmp_path)) == 1


def test_a_measured_dilation_holds_for_the_same_ranks_and_reference() -> None:
    config = Config()
    info = CheckpointInfo(10, config.cluster.ranks, torch.__version__, to_dict(config), {}, {}, time_dilation=170.0)
    assert dilation_to_keep(info, config) == 170
    config.cluster.ranks = 4  # share the same cores
    assert dilation_to_keep(info, config) is None
    config.cluster.ranks, config.network.reference_gpu = info.ranks, "h100"
    assert dilation_to_keep(info, config) is None


def test_must_without_anything_to_continue(tmp_path: Path) -> None:
    config = Config()
    config.trainer.resume = "must"
    with pytest.raises(UserError, match=r"trainer\.resume=must, but .*checkpoints holds no checkpoint"):
        prepare_start(tmp_path, config)
    leave_run(tmp_path, config, config.trainer.max_steps, "done")
    with pytest.raises(UserError, match=r"is finished; raise trainer\.max_steps"):
        prepare_start(tmp_path, config)
