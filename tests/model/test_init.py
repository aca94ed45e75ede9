"""Initial values: the same for any number of ranks, tied where asked, with GPT-2's spread."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from tagc.config import TrainerConfig
from tests.distributed import run_ranks
from tests.model.common import build_plain, build_sharded, full_parameters

CASES = [{}, {"tie_weights": True}, {"context": 2}]  # with two positions and three ranks, one rank's shard is empty


def _digests(parameters: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in parameters.items()}


def _sharded_digests(rank: int) -> list[dict[str, str]]:
    return [_digests(full_parameters(build_sharded(TrainerConfig(), seed=3, **case)[0])) for case in CASES]


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_do_not_depend_on_ranks_or_sharding(ranks: int) -> None:
    expected = [_digests(full_parameters(build_plain(seed=3, **case))) for case in CASES]
    for on_one_rank in run_ranks(_sharded_digests, ranks):
        assert on_one_rank == expected


def test_seeds_and_parameters_have_values_of_their_own() -> None:
    first, same, other = (full_parameters(build_plain(seed=seed)) for seed in (1, 1, 2))
    matrices = [name for name, value in first.items() if value.dim() == 2]
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert not torch.equal(first["blocks.0.mlp.fc.weight"], first["blocks.1.mlp.fc.weight"])


def test_values_have_gpt2s_spread() -> None:
    layers = 8
    for name, value in full_parameters(build_plain(layers=layers, width=80)).items():
        if name.endswith("bias"):
            assert torch.all(value == 0), name
        elif value.dim() == 1:
            assert torch.all(value == 1), name
        else:
            std = 0.02 / math.sqrt(2 * layers) if name.endswith("proj.weight") else 0.02
            deviations = 5 / math.sqrt(2 * value.numel())  # five standard errors of an estimated deviation
            assert abs(value.std().item() / std - 1) < deviations, name
            assert abs(value.mean().item()) < 5 * std / math.sqrt(value.numel()), name


def test_nothing_is_left_on_the_meta_device() -> None:
    gpt = build_plain()
    assert not list(gpt.buffers())
    assert all(parameter.device.type == "cpu" and parameter.requires_grad for parameter in gpt.parameters())
