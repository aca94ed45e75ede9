"""Closed forms of a unit's traffic at any number of ranks."""

from __future__ import annotations

import pytest
import torch

from tagc.cli.entry import compose_config
from tagc.model.gpt import GPT
from tagc.predict.traffic import UnitTraffic, plan_traffic
from tagc.train.parallel import plan_units

NANO_PARAMETERS = 3_377_280


def plan(*overrides: str) -> list[UnitTraffic]:
    config = compose_config(overrides)
    with torch.device("meta"):
        model = GPT(config.model, config.data.vocab_size)
    parameters = plan_units(model)
    return plan_traffic(config, parameters, config.cluster.ranks)


def gradient_bytes(*overrides: str) -> int:
    return sum(unit.gradient_bytes for unit in plan(*overrides))


@pytest.mark.parametrize(
    ("compressor", "counted"),
    [("noop", 0), ("fsdp", 6_754_560), ("bf16", 3_377_280), ("tagc", 4_174_824), ("tagc2", 2_314_068)],
)
def test_two_ranks_move_what_recorded_runs_of_nano_counted(compressor: str, counted: int) -> None:
    assert gradient_bytes(f"compressor={compressor}", "compressor.warmup_steps=5") == counted


def test_gathers_follow_the_dtype_and_name_the_units_in_order() -> None:
    units = plan("compressor=fsdp", "trainer.param_dtype=bfloat16")
    assert [unit.name for unit in units] == ["root", "wte", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert sum(unit.gather_bytes for unit in units) == NANO_PARAMETERS
    assert sum(unit.numel for unit in units) == NANO_PARAMETERS


def test_any_number_of_ranks_without_running_them() -> None:
    """A packed message does not grow with the ranks; a sketch of their union does, until it goes dense."""
    ranks = 64
    many = ("cluster.ranks=64", "trainer.global_batch=64")
    dense, packed = gradient_bytes("compressor=bf16", *many), gradient_bytes("compressor=packed", *many)
    assert dense == pytest.approx(2 * NANO_PARAMETERS * (ranks - 1) / ranks, rel=0.05)  # padding
    assert packed < 0.7 * dense
    sketches = plan("compressor=tagc2", *many)
    assert [unit.dense_frac for unit in sketches] == [0, 1, 1, 1, 1, 1, 1]  # root has nothing to compress
    assert sum(unit.gradient_bytes for unit in sketches) > dense  # its dense columns stay fp32
