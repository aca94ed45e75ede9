"""A step that ends in an error on real ranks: what the compressors keep is what they kept before it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tagc.comm.step_metrics import STATS, summarise_step
from tagc.config import Config
from tagc.errors import UserError
from tests.comm.harness import TinyRun, tiny_config
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed

METHODS = ["tagc", "packed", "int8"]


def make_config(name: str, overlap: bool = True, **compressor: Any) -> Config:
    """As a user trains: with the communication thread, and without the comparison that switches it off."""
    config = tiny_config(name, **compressor)
    config.logging.fidelity_every, config.trainer.overlap = 0, overlap
    return config


def fail(run: TinyRun, step: int, on_rank: int) -> str:
    """A backward with NaN in one layer's gradients on one rank, caught by the caller, who skips the step."""
    hook = run.model.blocks[1].mlp.proj.register_full_backward_pre_hook(
        lambda module, grads: (grads[0] * torch.nan,) if run.rank == on_rank else None
    )
    with pytest.raises(UserError) as error:
        run.backward(step)
    hook.remove()
    run.optimizer.zero_grad(set_to_none=True)
    return str(error.value)


def copy_state(run: TinyRun) -> dict[str, torch.Tensor]:
    """All that later steps depend on, of this rank: residuals, parameters."""
    parameters = {f"parameter {name}": p.to_local() for name, p in run.model.named_parameters()}
    state = {**run.sync.compressor_state(), **run.sync.residuals(), **parameters}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values are not bitwise the same."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def go_on(rank: int, config: Config) -> tuple[str, list[str], list[float]]:
    """Fail at step 1 and go on, beside a twin that never had that step."""
    run, twin = TinyRun(config), TinyRun(config)
    for each in (run, twin):
        each.backward(0)
        each.update()
    before = copy_state(run)
    assert any(residual.any() for residual in run.sync.residuals().values())
    message = fail(run, 1, on_rank=1)
    wrong = differences(copy_state(run), before)
    norms = []
    for step in (2, 3):
        for each in (run, twin):
            each.backward(step)
            each.update()
        assert run.report.metrics == twin.report.metrics
        wrong += differences(copy_state(run), copy_state(twin))
        wrong += [name for name, residual in run.sync.residuals().items() if not residual.isfinite().all()]
        norms.append(run.report.metrics["residual_norm"])
    return message, wrong, norms


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"warmup_steps": 2, "value_dtype": "bfloat16"}])
def test_after_a_step_with_nan_all_is_as_if_it_had_not_been(name: str, settings: dict[str, Any]) -> None:
    for message, wrong, norms in run_ranks(go_on, 2, make_config(name, **settings)):
        assert message.startswith("step 2: the gradient of ")
        assert "on rank 1; this step updated nothing" in message
        assert wrong == []
        assert all(0 < norm < math.inf for norm in norms)


def spoil(rank: int, config: Config) -> str:
    """A residual that is NaN on one rank, as an older version could leave it."""
    run = TinyRun(config)
    for slot in run.sync.buckets[-1].slots if rank == 1 else ():
        compressor = slot.compressor
        compressor.load_residuals({name: torch.full_like(r, torch.nan) for name, r in compressor.residuals().items()})
    with pytest.raises(UserError) as error:
        run.backward(0)
    dist.barrier()  # no rank waits for another one that went on
    return str(error.value)


@pytest.mark.parametrize("name", METHODS)
def test_a_residual_that_is_nan_stops_every_rank(name: str) -> None:
    first, second = run_ranks(spoil, 2, make_config(name))
    assert first == second
    assert first.startswith("step 1: the residual of ")
    assert "on rank 1; this step updated nothing" in first


def measure_with_nan(rank: int, config: Config) -> tuple[float, float]:
    """The residual's norm of a step, from its numbers and from the same with one NaN among them."""
    run = TinyRun(config)
    found: list[float] = []
    conclude = run.sync._conclude

    def spy(slots: Any, numbers: Any, stats_RSF: torch.Tensor) -> Any:
        spoiled_RSF = stats_RSF.clone()
        spoiled_RSF[1, 0, STATS.index("residual_squared")] = math.nan
        found.extend(summarise_step(slots, stats)["residual_norm"] for stats in (stats_RSF, spoiled_RSF))
        return conclude(slots, numbers, stats_RSF)

    run.sync._conclude = spy
    run.backward(0)
    return found[0], found[1]


@pytest.mark.parametrize("name", METHODS)
def test_the_residual_norm_leaves_out_no_nan(name: str) -> None:
    for norm, spoiled in run_ranks(measure_with_nan, 2, make_config(name)):
        assert norm > 0
        assert math.isnan(spoiled)
