"""FSDP2 units on real ranks: the same training as one process, names, order, and what an expert tunes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from tagc.comm.fsdp2 import read_units
from tagc.config import TrainerConfig
from tagc.model.gpt import flops_per_token, parameter_count
from tagc.train.parallel import _tune_communication, plan_units
from tests.distributed import run_ranks
from tests.model.common import build_plain, build_sharded, global_batch, train

pytestmark = pytest.mark.distributed

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # model keys, trainer keys, micro-batches per step
    "untied": ({}, {}, 1),
    "tied": ({"tie_weights": True}, {}, 1),
    "accumulation": ({}, {}, 2),
    "kept gathered": ({"tie_weights": True}, {"reshard_after_forward": False}, 2),
    "recomputed": ({}, {"activation_checkpointing": True}, 1),
    "an empty shard": ({"context": 2}, {}, 1),
}


def _train_all_cases(rank: int) -> dict[str, Any]:
    ranks, results = dist.get_world_size(), {}
    for case, (model, trainer_keys, accumulation) in CASES.items():
        trainer = TrainerConfig(**trainer_keys)
        gpt, _ = build_sharded(trainer, **model)
        result = train(gpt, trainer, rank, ranks, accumulation=accumulation)
        result["tied"] = gpt.lm_head.weight is gpt.wte.weight
        result["counts"] = parameter_count(gpt), flops_per_token(gpt)
        assert all(b.recompute_activations is trainer.activation_checkpointing for b in gpt.blocks)
        results[case] = result
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_training_is_plain_training(ranks: int) -> None:
    """Losses, the global norm, the first step's gradients and the final parameters, up to the order of summation."""
    results = run_ranks(_train_all_cases, ranks)
    for case, (model, _, _) in CASES.items():
        plain = build_plain(**model)
        expected = train(plain, TrainerConfig())
        for result in (on_rank[case] for on_rank in results):
            assert result["tied"] is model.get("tie_weights", False)
            assert result["counts"] == (parameter_count(plain), flops_per_token(plain))
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5), case
            assert result["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-5), case
            torch.testing.assert_close(result["norms"], expected["norms"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(result["gradients"], expected["gradients"], rtol=1e-4, atol=1e-6)
            # AdamW divides by the root of tiny second moments, which amplifies the last bit of a gradient.
            torch.testing.assert_close(result["parameters"], expected["parameters"], rtol=1e-3, atol=2e-4)
        assert all(on_rank[case]["losses"] == results[0][case]["losses"] for on_rank in results)


def _names_and_orders(rank: int, tie_weights: bool) -> tuple[list[str], Any, Any, list[str]]:
    trainer = TrainerConfig(activation_checkpointing=True)
    gpt, units = build_sharded(trainer, tie_weights=tie_weights)
    read = {unit.name: unit.parameters for unit in read_units(gpt, {module: name for name, module in units})}
    inputs, targets = global_batch(0, 16)
    gpt(inputs, targets)  # FSDP names its parameters in the first forward
    gpt.reshard()
    documented = plan_units(gpt)
    assert read == documented
    private = {
        name: [(p._param_fqn, p._orig_size) for p in unit._get_fsdp_state()._fsdp_param_groups[0].fsdp_params]
        for name, unit in units
    }
    return [name for name, _ in units], documented, private, [name for name, _ in gpt.named_parameters()]


@pytest.mark.parametrize("tie_weights", [False, True])
def test_units_list_their_parameters_in_fsdps_order(tie_weights: bool) -> None:
    names, documented, private, parameters = run_ranks(_names_and_orders, 2, tie_weights)[0]
    assert documented == private
    assert list(documented) == names
    plain_names = [name for name, _ in build_plain(tie_weights=tie_weights).named_parameters()]
    assert parameters == plain_names
    listed = [name for unit in documented.values() for name, _ in unit]
    assert sorted(listed) == sorted(plain_names)
    if tie_weights:
        assert names == ["root", "blocks.0", "blocks.1"]
        assert [name for name, _ in documented["root"]] == ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"]
    else:
        assert names == ["root", "wte", "blocks.0", "blocks.1", "head"]
        assert documented["root"] == [("wpe.weight", (16, 35))]
        assert documented["wte"] == [("wte.weight", (61, 35))]
        assert [name for name, _ in documented["head"]] == ["ln_f.weight", "ln_f.bias", "lm_head.weight"]


def _count_collectives(rank: int, reshard_after_forward: bool) -> dict[str, int]:
    gpt, _ = build_sharded(TrainerConfig(reshard_after_forward=reshard_after_forward))
    inputs, targets = global_batch(0, 16)
    with CommDebugMode() as communication:
        gpt(inputs, targets).backward()
    return {str(op): count for op, count in communication.get_comm_counts().items()}


@pytest.mark.parametrize(("reshard_after_forward", "gathers"), [(True, 7), (False, 5)])
def test_only_blocks_are_gathered_twice(reshard_after_forward: bool, gathers: int) -> None:
    """Backward needs no token embedding, and the root and the head are still gathered when it starts."""
    counts = run_ranks(_count_collectives, 2, reshard_after_forward)[0]
    assert sum(count for op, count in counts.items() if "gather" in op) == gathers
    assert sum(count for op, count in counts.items() if "reduce_scatter" in op) == 5


def _train_tuned_for_cuda(rank: int) -> list[float]:
    trainer = TrainerConfig()
    gpt, units = build_sharded(trainer)
    _tune_communication(units, "cuda")
    return train(gpt, trainer, rank, dist.get_world_size())["losses"]


def test_what_is_tuned_for_cuda_trains_the_same() -> None:
    """The prefetch order and the separate process group are exercised on gloo, where they must not change a loss."""
    expected = train(build_plain(), TrainerConfig())["losses"]
    for losses in run_ranks(_train_tuned_for_cuda, 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def _train_in_bfloat16(rank: int) -> tuple[dict[str, Any], set[torch.dtype]]:
    trainer = TrainerConfig(param_dtype="bfloat16")
    gpt, _ = build_sharded(trainer)
    result = train(gpt, trainer, rank, dist.get_world_size())
    return result, {value.dtype for kind in ("gradients", "parameters") for value in result[kind].values()}


def test_bfloat16_computes_roughly_the_same_and_reduces_in_fp32() -> None:
    expected = train(build_plain(), TrainerConfig())
    for result, dtypes in run_ranks(_train_in_bfloat16, 2):
        assert dtypes == {torch.float32}
        assert result["losses"] == pytest.approx(expected["losses"], rel=5e-3)
        assert result["losses"] != expected["losses"]
        reduced = result["gradients"]["lm_head.weight"]
        assert not torch.equal(reduced, reduced.bfloat16().float())  # a sum in bfloat16 would fit into bfloat16
        for name, gradient in result["gradients"].items():
            reference = expected["gradients"][name]
            # the key bias has no gradient at all in exact arithmetic; its rounding noise counts against the whole
            assert (gradient - reference).norm() < 0.03 * reference.norm() + 1e-4, name


def _train_compiled(rank: int) -> tuple[list[float], list[str]]:
    trainer = TrainerConfig(compile=True)
    gpt, _ = build_sharded(trainer)
    losses = train(gpt, trainer, rank, dist.get_world_size())["losses"]
    return losses, [name for name, _ in gpt.named_parameters()]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
def test_compiled_blocks_compute_the_same() -> None:
    losses, names = run_ranks(_train_compiled, 1)[0]
    plain = build_plain()
    assert names == [name for name, _ in plain.named_parameters()]
    assert losses == pytest.approx(train(plain, TrainerConfig())["losses"], rel=1e-4)
