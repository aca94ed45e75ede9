"""Closed forms of a unit's traffic at any number of ranks."""

from __future__ import annotations

import pytest
import torch

from tagc.cli.entry import compose_config
from tagc.comm.buckets import build_bucket
from tagc.compressors import COMPRESSORS
from tagc.errors import UserError
from tagc.kernels import reference
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
@pytest.mark.parametrize(
    "overrides",
    [
        *([f"compressor={name}"] for name in COMPRESSORS),
        ["compressor=packed", "compressor.sparsity=0.3"],  # a message larger than a dense step
        ["compressor=tagc2", "compressor.sparsity=0.95", "compressor.residual_dtype=bfloat16"],
        ["compressor=tagc2", "compressor.dense_fallback=false"],
        ["compressor=int4", "compressor.block=8", "compressor.layers=*.mlp.*"],
    ],
    ids=" ".join,
)
def test_bytes_and_memory_are_those_of_the_compressors(overrides: list[str], ranks: int) -> None:
    config = compose_config([*overrides, f"cluster.ranks={ranks}", f"trainer.global_batch={ranks}"])
    with torch.device("meta"):
        parameters = plan_units(GPT(config.model, config.data.vocab_size))
    method, meta = COMPRESSORS[config.compressor.name], torch.device("meta")
    for traffic in plan_traffic(config, parameters, ranks):
        members = parameters[traffic.name]
        bucket = build_bucket(config.compressor, method, 0, traffic.name, members, ranks, 0, meta, reference)
        compressors = [slot.compressor for slot in bucket.slots]
        assert traffic.gradient_bytes == sum(compressor.steady_bytes for compressor in compressors)
        assert traffic.residual_bytes == sum(compressor.residual_bytes for compressor in compressors)
        assert traffic.numel == ranks * sum(slot.numel for slot in bucket.slots)
        is_dense = any(c.compresses and c.explain_dense() is not None for c in compressors)
        assert traffic.dense_frac == is_dense


def test_a_difference_is_gathered_once_and_kept_by_every_rank() -> None:
    """857,514 bytes a step were counted by a recorded run of nano, past its dense round."""
    units = plan("compressor=int4", "weights=delta4")
    assert sum(unit.gather_bytes for unit in units) == 857_514
    assert all(unit.is_gathered_once for unit in units)
    assert sum(unit.replica_bytes for unit in units) == 4 * NANO_PARAMETERS
    small = plan("compressor=int4", "weights=delta4", "weights.min_numel=30000")[0]  # the root has 24,576 elements
    assert (small.gather_bytes, small.is_gathered_once, small.replica_bytes) == (4 * 24_576 // 2, False, 0)


def test_a_shard_that_positions_cannot_count_is_refused() -> None:
    config = compose_config(["compressor=packed"])
    with pytest.raises(UserError, match="shard over more ranks"):
        plan_traffic(config, {"wte": [("wte.weight", (2**33, 1))]}, 2)
