"""What ``tagc.compress`` refuses, in words that name the argument."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import tagc
from tagc.comm import fsdp2
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


def several_groups(ranks: int) -> None:
    """A part of each unit on a mesh of its own, as FSDP2 allows for experts: of all ranks, or of one each."""
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, dist.get_world_size(), ranks)]
    own = FSDPMeshInfo(DeviceMesh.from_group(groups[dist.get_rank() // ranks], "cpu"), shard_mesh_dim=0)
    model = Foreign()
    for layer in model.layers:
        ups = set(layer.up.parameters())
        fully_shard(
            layer, shard_placement_fn=lambda p, ups=ups: ShardPlacementResult(Shard(0), own) if p in ups else None
        )
    fully_shard(model)
    tagc.compress(model, torch.optim.SGD(model.parameters()), gradients="fsdp")


def other_dimension() -> None:
    model = Foreign()
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None)
    tagc.compress(model, torch.optim.SGD(model.parameters()), gradients="fsdp")


def half_precision_sums() -> None:
    model = Foreign()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    tagc.compress(model, torch.optim.SGD(model.parameters()), gradients="fsdp")


def optimizer_of_another_model() -> None:
    loop = Loop("by block")
    tagc.compress(loop.model, Loop("by block").optimizer, gradients="fsdp")


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
    "another model's optimizer": (optimizer_of_another_model, r"the optimizer \(AdamW\) updates none of the model's"),
    "groups of the same ranks": (
        lambda: several_groups(2),
        r"unit layers\.0 has 2 parameter groups .* give each mesh a fully_shard call of its own",
    ),
    "groups of other ranks": (
        lambda: several_groups(1),
        "sharded over different ranks; shard all of them over one",
    ),
    "other dimension": (other_dimension, r"embed\.weight is sharded as S\(1\); only Shard\(0\) can be compressed"),
    "fp16 sums": (half_precision_sums, r"unit root reduces gradients in torch\.float16; set MixedPrecisionPolicy"),
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


def is_plain(model: FSDPModule) -> bool:
    """Whether nothing of tagc is attached to the model's units."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in fsdp2._param_groups(module)]
    return not any(type(g._reduce_scatter_comm).__module__.startswith("tagc") for g in groups)


def refuse_and_leave_plain(rank: int) -> None:
    """What was refused trains on as plain FSDP2, and a right call afterwards works."""
    loop, plain = Loop("by block"), Loop("by block")
    for options in (
        {"gradients": "tagc3"},
        {"gradients": "int8", "sparsity": 0.5},
        {"gradients": "tagc", "layers": "no.*"},
    ):
        with pytest.raises(UserError):
            tagc.compress(loop.model, loop.optimizer, **options)  # type: ignore[arg-type]
        assert is_plain(loop.model)
    loop.compression = tagc.compress(loop.model, loop.optimizer, gradients="fsdp", kernels="reference")
    assert not is_plain(loop.model)
    assert loop.train(2) == plain.train(2)


def test_a_refused_call_changes_nothing() -> None:
    run_ranks(refuse_and_leave_plain, 2)


def use_two_optimizers(rank: int) -> tuple[list[str], str, str]:
    """One optimizer for the matrices, passed to compress, and one for the rest; against one for all."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tagc").addHandler(handler)
    whole, split = Loop("by block", {"gradients": "fsdp"}), Loop("by block")
    report = str(whole.compression.report())  # type: ignore[union-attr]
    matrices = [p for p in split.model.parameters() if p.ndim == 2]
    rest = torch.optim.AdamW((p for p in split.model.parameters() if p.ndim != 2), lr=3e-3)
    split.optimizer = torch.optim.AdamW(matrices, lr=3e-3)
    assert lines == [] or rank == 0
    lines.clear()
    split.compression = tagc.compress(split.model, split.optimizer, gradients="fsdp", kernels="reference")
    split.optimizer.register_step_post_hook(lambda *_: (rest.step(), rest.zero_grad())[1])
    assert split.train(3) == whole.train(3)
    return lines, report, str(split.compression.report())


def test_an_optimizer_of_a_part_is_legal_and_said() -> None:
    first, second = run_ranks(use_two_optimizers, 2)
    pattern = (
        r"the optimizer \(AdamW\) updates \d+ of the \d+ parameters that train, not .* and \d+ more\. A step ends with"
    )
    assert any(re.search(pattern, line) for line in first[0]) and second[0] == []
    for _, whole, split in (first, second):
        assert not re.search(pattern, whole) and re.search(pattern, split)


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
