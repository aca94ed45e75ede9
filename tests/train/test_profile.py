"""Traces of real ranks: what is in them, which steps, and whether communication ran behind backward."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tagc.config import Config, TrainerConfig, validate
from tagc.errors import UserError
from tagc.train.profile import StepProfiler, load_events, measure_overlap
from tests.comm.harness import TinyRun, tiny_config
from tests.distributed import run_ranks


def stay_in_backward(*_: object) -> None:
    """So small a model's backward is over before a busy machine lets the other thread exchange a bucket."""
    time.sleep(0.05)


def profile_steps(rank: int, folder: str, overlap: bool, steps: int) -> list[bool]:
    """Train under the profiler until the run ends or is stopped; returns which steps were traced."""
    config = tiny_config("tagc")
    config.logging.fidelity_every, config.trainer.overlap = 0, overlap
    run = TinyRun(config)
    run.exchange.link.set_rate(1e6)  # a bucket takes milliseconds
    run.model.blocks[0].ln_1.register_full_backward_hook(stay_in_backward)

    def train_step(step: int) -> dict[str, float]:
        loss = run.backward(step)
        run.update()
        return {"train_loss": loss.item()}

    profiler = StepProfiler(TrainerConfig(profile=True, timing_warmup_steps=1), Path(folder), torch.device("cpu"))
    traced = ["profiled" in profiler.run(train_step, step) for step in range(steps)]
    profiler.close()
    return traced


def profile_both_ways(rank: int, folder: str) -> list[list[bool]]:
    return [profile_steps(rank, f"{folder}/{overlap}", overlap, steps) for overlap, steps in ((True, 5), (False, 3))]


@pytest.mark.distributed
def test_a_trace_shows_overlap_where_there_is_some(tmp_path):
    """Three steps are traced, or as many as there are, on every rank and in all its threads."""
    for traced in run_ranks(profile_both_ways, 2, str(tmp_path)):
        assert traced == [[False, True, True, True, False], [False, True, True]]
    for rank in range(2):
        behind, in_line = (load_events(tmp_path / f"{way}/profile/rank{rank}.json.gz") for way in (True, False))
        for events, steps in ((behind, 3), (in_line, 2)):
            names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
            assert {"encode", "exchange", "decode", "gather", "exposed"} <= set(names)
            for bucket in ("root", "wte", "blocks.0", "blocks.1", "head"):
                assert names.count(f"bucket {bucket}") == steps
            assert measure_overlap(events).exchange_ms > 1
        assert measure_overlap(behind).hidden_ms > 0
        assert measure_overlap(in_line).hidden_ms == 0


def test_a_run_without_a_step_to_trace_is_refused():
    with pytest.raises(UserError, match=r"trainer.max_steps=5 leaves none; set trainer.max_steps=8"):
        validate(Config(trainer=TrainerConfig(profile=True, max_steps=5)))
    validate(Config(trainer=TrainerConfig(profile=True, max_steps=6)))
