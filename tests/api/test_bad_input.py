"""What ``tagc.compress`` refuses, in words that name the argument."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tagc
from tagc.errors import UserError
from tests.api.foreign import Foreign, Loop, shard
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def fresh(**keys: Any) -> Callable[[], Any]:
    return lambda: Loop("by block", keys)


def unsharded() -> None:
    model = Foreign()
    tagc.compress(model, torch.optim.SGD(model.parameters()), gradients="fsdp")


def only_blocks_sharded() -> None:
    model = Foreign()
    for layer in model.layers:
        fully_shard(layer)
    tagc.compress(model, torch.optim.SGD(model.parameters()), gradients="fsdp")


def twice() -> None:
    loop = Loop("by block", {"gradients": "fsdp"})
    tagc.compress(loop.model, loop.optimizer, gradients="fsdp")


def after_forward() -> None:
    loop = Loop("by block")
    loop.model(torch.zeros(2, 2, dtype=torch.int64))
    tagc.compress(loop.model, loop.optimizer, gradients="fsdp")


def old_optimizer() -> None:
    model = Foreign()
    optimizer = torch.optim.SGD(model.parameters())
    tagc.compress(shard(model, "by block"), optimizer, gradients="fsdp")


def mixed_dtypes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    fully_shard(model)
    tagc.compress(model, torch.optim.SGD(model.parameters()), gradients="fsdp")


def all_frozen() -> None:
    model = Foreign().requires_grad_(False)
    optimizer = torch.optim.SGD(shard(model, "by block").parameters())
    tagc.compress(model, optimizer, gradients="fsdp")


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "unsharded": (unsharded, r"\(Foreign\) is no FSDP2 module: call fully_shard"),
    "only blocks": (only_blocks_sharded, r"\(Foreign\) is no FSDP2 module: call fully_shard .* on the model itself"),
    "twice": (twice, r"unit root is compressed already: call remove\(\)"),
    "after forward": (after_forward, "has already run forward"),
    "old optimizer": (old_optimizer, r"the optimizer \(SGD\) updates none of the model's parameters"),
    "mixed dtypes": (mixed_dtypes, "unit root mixes parameters of torch.bfloat16, torch.float32"),
    "all frozen": (all_frozen, "no parameter of the model requires a gradient"),
    "method": (fresh(gradients="tagc3"), "^gradients='tagc3' is out of range; legal: noop, fsdp"),
    "method type": (fresh(gradients=7), "^gradients=7 is neither"),
    "weights": (fresh(gradients="fsdp", weights="delta9"), "^weights='delta9' is out of range; legal: full"),
    "option": (fresh(gradients="tagc", sparsty=0.5), "^sparsty=0.5 is no option of a compressor; legal: "),
    "unused option": (
        fresh(gradients="int8", sparsity=0.5),
        "^sparsity=0.5 is no option of gradients='int8'; it takes: ",
    ),
    "range": (fresh(gradients="tagc", sparsity=1.5), r"^sparsity=1.5 is out of range; legal: a share in \[0, 1\)"),
    "type": (fresh(gradients="tagc", sparsity="0.5"), "^sparsity='0.5' must be of type float, not str"),
    "selects nothing": (fresh(gradients="tagc", layers="no.*"), r"^layers=no\.\* selects no parameter"),
    "seed": (fresh(gradients="tagc", seed=-1), "^seed=-1 is out of range"),
}


def refuse_every_case(rank: int) -> dict[str, str]:
    said = {}
    for case, (call, _) in CASES.items():
        try:
            call()
            said[case] = "nothing"
        except UserError as error:
            said[case] = str(error)
    return said


def test_bad_input_is_refused_in_words() -> None:
    for said in run_ranks(refuse_every_case, 2):
        for case, (_, pattern) in CASES.items():
            assert re.search(pattern, said[case]), f"{case}: {said[case]}"


def disagree(rank: int) -> list[str]:
    said = []
    settings: list[dict[str, Any]] = [
        {"gradients": "tagc2" if rank else "packed", "layers": "all", "min_numel": 512},
        {"gradients": "tagc2", "layers": "all", "min_numel": 512, "sparsity": 0.5 + 0.1 * rank},
        {"gradients": "tagc2", "layers": "all", "min_numel": 512, "sparsity": 0.5 if rank else 2.0},
    ]
    for options in settings:
        with pytest.raises(UserError) as error:
            Loop("by block", options)
        said.append(str(error.value))
    with pytest.raises(UserError) as error:
        Loop("frozen" if rank else "by block", {"gradients": "fsdp"})
    return [*said, str(error.value)]


def test_ranks_with_other_settings_learn_it_at_once() -> None:
    first, second = run_ranks(disagree, 2, timeout_s=300)
    assert "disagree about gradients: here='packed', something else on rank 1" in first[0]
    assert "disagree about gradients: here='tagc2', something else on rank 0" in second[0]
    assert "disagree about sparsity: here=0.6" in second[1]
    assert first[2].startswith("sparsity=2.0 is out of range")
    assert "failed on rank 0" in second[2]
    assert "disagree about model" in first[3]


def reduce_twice(rank: int) -> None:
    loop = Loop("by block", {"gradients": "fsdp"})
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    loop.model(tokens).sum().backward()
    loop.optimizer.zero_grad()  # the step is skipped
    loop.model(tokens).sum().backward()
    with pytest.raises(UserError, match=r"reduced twice in step 0.*set_requires_gradient_sync"):
        loop.model(tokens).sum().backward()


def test_a_second_reduction_is_refused_but_not_a_skipped_step() -> None:
    run_ranks(reduce_twice, 2)


@pytest.mark.parametrize(
    ("use", "unwanted"),
    [
        ("tagc.compress", ("hydra", "omegaconf", "wandb", "pandas", "submitit", "rich", "tokenizers", "tagc.train")),
        ("None", ("torch", "numpy", "numba")),
    ],
)
def test_import_is_light(use: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, tagc; {use}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True)
    loaded = done.stdout.split()
    assert "tagc" in loaded and [name for name in loaded if name.startswith(unwanted)] == []
