"""``tagc.compress`` on a model and a loop that are not ours."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tagc.compressors.quantize import Int8
from tagc.errors import UserError
from tests.api.foreign import WAYS, Loop
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed

TAGC2: dict[str, Any] = {"gradients": "tagc2", "layers": "all", "min_numel": 512, "sparsity": 0.8}


def differences(left: Loop, right: Loop) -> list[str]:
    ours, theirs = left.shards(), right.shards()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def train_every_way(rank: int) -> dict[str, list[str]]:
    found = {}
    for way in WAYS:
        ours, plain = Loop(way, {"gradients": "fsdp"}), Loop(way)
        same = ours.train(3) == plain.train(3)
        found[way] = differences(ours, plain) + ([] if same else ["losses"])
    return found


def test_fsdp_is_bitwise_plain_fsdp2_however_the_model_is_sharded() -> None:
    for found in run_ranks(train_every_way, 2):
        assert found == {way: [] for way in WAYS}


def count_bytes(rank: int) -> list[tuple[str, int, int, int, dict[str, Any], list[float]]]:
    results = []
    for way in ("by block", "listed", "nested", "frozen", "mixed precision"):
        loop = Loop(way, TAGC2)
        assert loop.compression is not None
        losses = loop.train(12)
        report, metrics = loop.compression.report(), loop.compression.metrics()
        expected = sum(loop.compression.sync.expected_bytes(loop.compression.step - 1).values())
        sent = sum(row["sent_bytes"] for row in report.rows)
        assert "tagc2" in str(report) and "not selected by layers=all" in str(report)
        results.append((way, int(metrics["grad_wire_bytes"] or 0), sent, expected, metrics, losses))
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_tagc2_learns_and_counts_the_closed_form(ranks: int) -> None:
    for results in run_ranks(count_bytes, ranks):
        for way, counted, by_layer, expected, metrics, losses in results:
            assert counted - int(metrics["return_wire_bytes"]) == by_layer == expected > 0, way
            assert metrics["compressed_buckets"] and 0.7 < metrics["achieved_sparsity"] < 0.9, way
            assert metrics["param_wire_bytes"] > 0
            assert metrics["step"] == 12
            assert losses[-1] < losses[0], way


def resume(rank: int, folder: str) -> list[str]:
    options = [TAGC2, {"gradients": "packed", "layers": "all", "min_numel": 512}]
    found = []
    for number, option in enumerate(options):
        whole, fresh = Loop("by block", option), Loop("by block", option)
        whole.train(3)
        model, optimizer = get_state_dict(whole.model, whole.optimizer)
        path = f"{folder}/{number}"
        dcp.save({"model": model, "optimizer": optimizer, "compression": whole.compression}, checkpoint_id=path)
        expected = whole.train(3, first=3)
        model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
        state = {"model": model, "optimizer": optimizer, "compression": fresh.compression}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        assert fresh.compression is not None and fresh.compression.step == 3
        found += [] if fresh.train(3, first=3) == expected else ["losses"]
        found += differences(whole, fresh)
    return found


def test_a_distributed_checkpoint_continues_bitwise(tmp_path: Path) -> None:
    assert run_ranks(resume, 2, str(tmp_path)) == [[], []]


def remove(rank: int) -> list[str]:
    ours, plain = Loop("by block", TAGC2), Loop("by block")
    ours.train(2)
    assert ours.compression is not None
    ours.compression.remove()
    plain.train(2)
    state = copy.deepcopy(get_state_dict(ours.model, ours.optimizer))  # an optimizer keeps what it loads
    set_state_dict(plain.model, plain.optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    sent = ours.compression.sync.exchange.total_bytes.copy()
    ours.model.set_reduce_scatter_unused_params(True)  # type: ignore[attr-defined]
    assert ours.train(3, first=2) == plain.train(3, first=2)
    assert ours.compression.sync.exchange.total_bytes == sent
    return differences(ours, plain)


def test_remove_gives_plain_fsdp2_back() -> None:
    assert run_ranks(remove, 2) == [[], []]


def complete_after_backward(rank: int) -> None:
    loop = Loop("embedding alone", {"gradients": "fsdp"})
    plain = Loop("embedding alone")
    seen: list[dict[str, torch.Tensor]] = []

    def keep(model: torch.nn.Module) -> None:
        seen.append({name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None})

    loop.step(0, lambda: keep(loop.model))
    plain.step(0, lambda: keep(plain.model))
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_gradients_are_complete_when_backward_returns() -> None:
    run_ranks(complete_after_backward, 2)


def diverge(rank: int) -> str:
    """The branch's unit never runs, and its neighbour's gradient is NaN on rank 1 in the second step."""
    loop = Loop("asleep", TAGC2)
    loop.step(0)
    before = loop.shards()
    handle = loop.model.final.register_full_backward_pre_hook(
        lambda module, grads: (grads[0] * torch.nan,) if rank == 1 else None
    )
    with pytest.raises(UserError) as error:
        loop.step(1)
    handle.remove()
    assert all(torch.equal(value, before[name]) for name, value in loop.shards().items())
    return str(error.value)


def test_nan_is_reported_by_step_parameter_and_rank_also_beside_a_unit_that_did_not_run() -> None:
    first, second = run_ranks(diverge, 2)
    assert first == second
    assert first.startswith("step 2: the gradient of final.bias, final.weight, ")
    assert "on rank 1; this step updated nothing" in first
    assert "branch" not in first and "head" not in first
    assert "trainer." not in first  # the arguments' names, not Hydra's


class Mine(Int8):
    """A compressor of a user's own."""


def use_a_class(rank: int) -> str:
    options = {"layers": "all", "min_numel": 512, "block": 64}
    ours, named = Loop("by block", {"gradients": Mine, **options}), Loop("by block", {"gradients": "int8", **options})
    assert ours.train(3) == named.train(3)
    assert ours.compression is not None
    return str(ours.compression.report())


def test_a_compressor_class_takes_the_place_of_a_name() -> None:
    assert "Mine" in run_ranks(use_a_class, 2)[0]


def use_two_models(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,)) if dist.get_world_size() == 2 else None
    first, second = Loop("by block", {"gradients": "fsdp"}, mesh), Loop("one unit", TAGC2, mesh)
    plain = Loop("by block", None, mesh)
    for step in range(2):
        assert first.step(step) == plain.step(step)
        second.step(step)
    assert differences(first, plain) == []


def test_two_models_in_one_process() -> None:
    run_ranks(use_two_models, 2)


def use_half_of_the_world(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
    ours, plain = Loop("by block", {"gradients": "fsdp"}, mesh), Loop("by block", None, mesh)
    assert ours.train(2) == plain.train(2)
    assert differences(ours, plain) == []
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))
    with pytest.raises(UserError, match=r"replicates \(HSDP\)"):
        Loop("by block", {"gradients": "fsdp"}, both)


def test_a_group_that_is_not_the_world() -> None:
    run_ranks(use_half_of_the_world, 4)


@pytest.mark.parametrize("file", ["plain_loop.py"])
def test_examples_run_under_torchrun(file: str) -> None:
    path = Path(__file__).parents[2] / "examples" / file
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    assert "tagc2" in done.stdout
