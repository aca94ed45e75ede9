"""Weights as differences: what travels when, that all ranks compute with the same weights, and what may go wrong."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tagc.comm.weight_gather import WeightGathers, hash_tensor
from tagc.config import WeightsConfig
from tagc.errors import UserError
from tagc.kernels import reference
from tagc.kernels.reference import EncodedDelta
from tests.api.foreign import WAYS, Loop
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def delta(name: str = "delta4", **keys: Any) -> dict[str, Any]:
    return {"gradients": "fsdp", "weights": WeightsConfig(name=name, min_numel=0, block=32, **keys)}


def raw_kernels() -> ModuleType:
    """Copies in place of differences: what is left is the bookkeeping."""
    module = ModuleType("raw")
    module.__dict__.update(reference.__dict__)

    def encode_delta(target_N: Tensor, replica_N: Tensor, **_: Any) -> EncodedDelta:
        return EncodedDelta(target_N.clone().view(torch.uint8), torch.zeros(1, dtype=torch.bfloat16))

    def apply_delta(codes_WM: Tensor, scales_WK: Tensor, replica_WN: Tensor, **_: Any) -> None:
        replica_WN.copy_(codes_WM.view(replica_WN.dtype))

    module.encode_delta, module.apply_delta = encode_delta, apply_delta  # type: ignore[attr-defined]
    return module


def weights_of(loop: Loop) -> WeightGathers:
    assert loop.compression is not None
    return loop.compression.sync.weights


def replicas(loop: Loop) -> list[Tensor]:
    return [gather.replica_WN.clone() for gather in weights_of(loop).kept if gather.replica_WN is not None]


def sent(loop: Loop) -> int:
    """Bytes of weights that this rank has sent so far."""
    assert loop.compression is not None
    return loop.compression.sync.exchange.total_bytes["param"]


def evaluate(loop: Loop) -> None:
    with torch.no_grad():
        loop.model(torch.zeros(2, 3, dtype=torch.int64), branch=False)
    loop.model.reshard()  # type: ignore[attr-defined] # the root stays gathered for a backward that does not come


# --- the bookkeeping ------------------------------------------------------------------------------------------------


def train_raw(rank: int, ways: tuple[str, ...]) -> dict[str, list[str]]:
    found = {}
    for way in ways:
        raw, full = Loop(way, {**delta(), "kernels": raw_kernels()}), Loop(way, {"gradients": "fsdp"})
        same = raw.train(4) == full.train(4)
        ours, theirs = raw.shards(), full.shards()
        found[way] = [name for name in ours if not torch.equal(ours[name], theirs[name])] + ([] if same else ["loss"])
    return found


@pytest.mark.parametrize(("ranks", "ways"), [(2, WAYS), (3, WAYS[:4]), (4, ("half gathered", "by block"))])
def test_copies_in_place_of_differences_change_no_bit(ranks: int, ways: tuple[str, ...]) -> None:
    for found in run_ranks(train_raw, ranks, ways):
        assert found == {way: [] for way in ways}


def count(rank: int) -> None:
    for way in ("by block", "accumulation", "recomputed", "mixed precision"):
        loop = Loop(way, delta())
        weights = weights_of(loop)
        loop.step(0)
        dense = sum(g.numel * g.unit.gather_dtype.itemsize for g in weights.gathers) * (dist.get_world_size() - 1)
        assert sent(loop) == weights.dense_bytes == dense
        for step in range(1, 4):
            before = sent(loop)
            loop.step(step)
            assert sent(loop) - before == weights.expected_bytes() > 0, way
        before = sent(loop)
        evaluate(loop)
        evaluate(loop)
        assert sent(loop) - before == weights.expected_bytes()  # the first gather after the optimizer's step
        loop.step(4)
        assert sent(loop) - before == weights.expected_bytes()
        assert weights.dense_bytes == dense
        assert loop.compression is not None and loop.compression.replica_bytes == sum(
            replica.nbytes for replica in replicas(loop)
        )


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_difference_travels_per_optimizer_step_and_is_the_closed_form(ranks: int) -> None:
    run_ranks(count, ranks)


def describe(rank: int) -> str:
    loop = Loop("by block", {"gradients": "fsdp", "weights": WeightsConfig(name="delta4", min_numel=3000, block=32)})
    loop.train(2)
    assert loop.compression is not None
    return str(loop.compression.report())


def test_the_report_says_how_weights_travel_and_which_travel_whole() -> None:
    text = run_ranks(describe, 2)[0]
    assert "weights travel as delta4: 0.0" in text and "replicas take" in text
    assert "root: its weights travel whole: fewer than weights.min_numel=3000 elements" in text


def send_statelessly(rank: int) -> None:
    for name, nbytes in (("bf16", 2.0), ("int8", 1 + 2 / 32)):
        loop, whole = Loop("by block", delta(name)), Loop("by block", {"gradients": "fsdp"})
        losses, exact = loop.train(8), whole.train(8)
        assert losses != exact and losses == pytest.approx(exact, rel=2e-2)
        assert sent(loop) == pytest.approx(sent(whole) * nbytes / 4, rel=0.02)
        assert weights_of(loop).kept == []


def test_rounded_weights_travel_in_every_gather() -> None:
    run_ranks(send_statelessly, 2)


# --- the replica ----------------------------------------------------------------------------------------------------


def agree(rank: int) -> None:
    for keys in ({}, {"rotate": True}, {"replica_dtype": "bfloat16"}):
        for name in ("delta8", "delta4", "delta3", "delta2"):
            loop, other = (Loop("by block", {**delta(name, **keys), "kernels": k}) for k in ("reference", "cpu"))
            for step in range(5):
                before = [p.to_local().detach().clone() for p in loop.model.parameters()]  # type: ignore[attr-defined]
                assert loop.step(step) == other.step(step)
                for ours, theirs in zip(replicas(loop), replicas(other), strict=True):
                    assert torch.equal(ours, theirs)
                    hashes: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(hashes, hash_tensor(ours).item())
                    assert len(set(hashes)) == 1
                own = weights_of(loop).state_dict()
                names = [name for name, _ in loop.model.named_parameters()]
                for parameter, target in zip(names, before, strict=True):  # within a step of its block's scale
                    lag = (own[parameter].to_local().float() - target).abs()
                    # AdamW's steps are below 2 * lr; the outlier of a block decides its scale
                    steps = (
                        {"delta8": 0.02, "delta4": 0.2, "delta3": 0.5, "delta2": 1.1}[name] * 6e-3 * (4 if keys else 1)
                    )
                    rounding = 2**-8 * target.abs() if "replica_dtype" in keys else 1e-6
                    assert (lag <= steps + rounding).all(), (name, keys, step, parameter)


def test_replicas_are_equal_on_all_ranks_and_backends_and_close_to_the_weights() -> None:
    run_ranks(agree, 2)


def learn(rank: int) -> tuple[list[float], list[float]]:
    return Loop("by block", delta("delta4")).train(30), Loop("by block", {"gradients": "fsdp"}).train(30)


def test_four_bits_learn_as_whole_weights_do() -> None:
    for rounded, whole in run_ranks(learn, 2):
        assert rounded[-1] == pytest.approx(whole[-1], rel=0.02) and rounded[-1] < 0.7 * rounded[0]


def resume(rank: int, folder: str) -> None:
    for number, validates in enumerate((False, True)):
        whole, fresh = Loop("by block", delta()), Loop("by block", delta())
        whole.train(3)
        if validates:
            evaluate(whole)  # sends the difference of step 3 before the checkpoint
        model, optimizer = get_state_dict(whole.model, whole.optimizer)
        path = f"{folder}/{number}"
        dcp.save({"model": model, "optimizer": optimizer, "compression": whole.compression}, checkpoint_id=path)
        expected = whole.train(3, first=3)
        model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
        state = {"model": model, "optimizer": optimizer, "compression": fresh.compression}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        assert fresh.train(3, first=3) == expected
        assert all(map(torch.equal, replicas(fresh), replicas(whole)))


def read_replica(rank: int, folder: str) -> dict[str, Tensor]:
    """The replica that a checkpoint of other ranks gives, whole."""
    loop = Loop("by block", delta())
    state: dict[str, Any] = {"replica": weights_of(loop).state_dict(), "replica_steps": weights_of(loop).sent_steps()}
    dcp.load({"compression": state}, checkpoint_id=f"{folder}/0")
    weights_of(loop).restore(state["replica"], state["replica_steps"])
    weights_of(loop).step = int(state["replica_steps"][0])  # no difference is due
    evaluate(loop)  # a dense round of the slices
    return {name: part.full_tensor() for name, part in weights_of(loop).state_dict().items()}


def test_a_checkpoint_continues_bitwise_and_its_replica_fits_other_ranks(tmp_path: Path) -> None:
    run_ranks(resume, 2, str(tmp_path))
    two, three = run_ranks(read_replica, 2, str(tmp_path))[0], run_ranks(read_replica, 3, str(tmp_path))[0]
    assert two.keys() == three.keys() and all(torch.equal(two[name], three[name]) for name in two)


# --- what may go wrong ----------------------------------------------------------------------------------------------


def change_weights(rank: int) -> list[str]:
    loop, messages = Loop("by block", delta()), []
    assert loop.compression is not None
    loop.train(2)
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    dense = weights_of(loop).dense_bytes
    loop.model.load_state_dict(state)
    loop.step(2)
    assert weights_of(loop).dense_bytes == 2 * dense  # by itself
    evaluate(loop)  # the replicas are as new as the weights are
    for change in (lambda p: p.data.mul_(1.01), lambda p: p.data.copy_(p.data + 1e-3)):
        if rank == 1:
            change(loop.model.head.weight)
        before = loop.shards()
        with pytest.raises(UserError) as error:
            loop.step(3)
        messages.append(str(error.value))
        assert all(torch.equal(value, before[name]) for name, value in loop.shards().items())
        loop.optimizer.zero_grad()
        loop.compression.refresh()
        loop.step(3)
        evaluate(loop)
    before = sent(loop)
    loop.optimizer.step = lambda: None  # type: ignore[method-assign, assignment] # as a gradient scaler that found Inf
    loop.step(4)
    loop.step(4)
    assert sent(loop) == before
    return messages


def test_weights_changed_outside_the_optimizer_are_an_error_on_every_rank() -> None:
    first, second = run_ranks(change_weights, 2)
    assert first == second
    for message in first:
        assert "the weights of root were changed outside the optimizer" in message and "call refresh()" in message


def meet_nan(rank: int) -> list[str]:
    messages = []
    for name in ("delta4", "int8"):
        loop = Loop("by block", delta(name))
        loop.train(2)
        if rank == 1:
            loop.model.layers[0].up.weight.data.to_local()[0, 0] = torch.nan
        before = replicas(loop)
        with pytest.raises(UserError) as error:
            loop.step(2)
        messages.append(str(error.value))
        assert all(map(torch.equal, before[1:], replicas(loop)[1:]))  # the root's was gathered before
    return messages


def test_nan_in_weights_is_an_error_on_every_rank_before_anything_is_applied() -> None:
    first, second = run_ranks(meet_nan, 2)
    assert first == second
    for message in first:
        assert message.startswith("the weights of unit layers.0 are NaN or Inf on rank 1; nothing was applied")


def disturb(rank: int) -> str:
    loop = Loop("by block", delta())
    loop.train(2)
    if rank == 1:
        replica = weights_of(loop).kept[1].replica_WN
        assert replica is not None
        replica[0, 3] += 1e-6
    assert loop.compression is not None
    loop.compression.sync.begin_step(100)
    with pytest.raises(UserError) as error:
        loop.step(100)
    return str(error.value)


def test_replicas_that_differ_are_found() -> None:
    first, second = run_ranks(disturb, 2)
    assert first == second and "the replicas of layers.0 differ between ranks" in first


def test_hashes_see_every_bit_and_place() -> None:
    numbers = torch.randn(3000)
    swapped, changed = numbers.clone(), numbers.clone()
    swapped[[5, 70]] = numbers[[70, 5]]
    changed[2999] = torch.nextafter(changed[2999], torch.tensor(9.0))
    assert len({hash_tensor(x).item() for x in (numbers, swapped, changed)}) == 3
    assert hash_tensor(numbers) == hash_tensor(numbers.clone())
    assert hash_tensor(numbers.bfloat16()) != hash_tensor(changed[:2999].bfloat16())
