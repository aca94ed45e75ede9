"""How the model is cut into FSDP2 units, each of which travels in one all-gather and one reduce-scatter.

    root    wpe: too small to travel alone; everything that is in no other unit belongs to the root
    wte     the token embedding, a bucket that is compressed whole
    blocks  one unit per transformer block, so that a block's communication hides behind its neighbours' computation
    head    ln_f and lm_head, the first gradients that backward finishes

With tied weights the embedding is also the LM head, needed first and last: wte, ln_f and lm_head join the root.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tagc.config import TrainerConfig
from tagc.model.gpt import GPT, Block

Units = list[tuple[str, FSDPModule]]


def shard_model(model: GPT, config: TrainerConfig, mesh: DeviceMesh) -> Units:
    """Apply activation checkpointing, ``torch.compile`` and ``fully_shard`` to the model, in place.

    Args: ``model``: plain, usually on the meta device. ``mesh``: one dimension, the FSDP ranks (1 is enough).
    Returns: (unit name, FSDP module) in forward order: root, wte, blocks.0 ..., head; tied: root, blocks.0 ....
    Parameter names do not change. Communication hooks of a unit are set on its module.
    """
    for block in model.blocks:
        assert isinstance(block, Block)
        block.recompute_activations = config.activation_checkpointing
        if config.compile:
            # The forward method, not the module: FSDP's hooks stay outside the compiled region.
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": _mixed_precision(config)}
    members = _unit_members(model)
    for name, modules in members.items():
        if name != "root":
            # Backward starts with the head, so freeing it after forward would only gather it again at once.
            reshard = config.reshard_after_forward and name != "head"
            fully_shard(modules, reshard_after_forward=reshard, **options)
    # The root goes last (FSDP2 wants children first), and stays gathered: its module ends forward and starts backward.
    fully_shard(model, reshard_after_forward=False, **options)
    units = list_units(model)
    _tune_communication(units, mesh.device_type)
    return units


def plan_units(model: GPT) -> dict[str, list[tuple[str, torch.Size]]]:
    """For each unit the (name, full shape) of its parameters, in the order in which FSDP lays out their gradients.

    For closed forms of a model that nobody shards; what a sharded one has, :func:`tagc.comm.fsdp2.read_units` reads
    from FSDP itself. FSDP orders a unit's parameters by a walk over its modules that skips nested units and repeated
    parameters. Only leaf modules of this model own parameters, so that is the order of ``named_parameters``. With
    ``set_reduce_scatter_unused_params`` every reduction holds all of them; without it, those that got a gradient.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    result: dict[str, list[tuple[str, torch.Size]]] = {}
    members = _unit_members(model)
    for unit in reversed(members):  # the root comes last and owns what is left
        parameters = [p for module in members[unit] for p in module.parameters() if p not in taken]
        taken.update(parameters)
        result[unit] = [(names[parameter], parameter.shape) for parameter in parameters]
    return {unit: result[unit] for unit in members}


def list_units(model: GPT) -> Units:
    """(unit name, its first module) in forward order; before ``shard_model`` these are no FSDP modules yet."""
    return [(name, modules[0]) for name, modules in _unit_members(model).items()]


def _unit_members(model: GPT) -> dict[str, list[Any]]:
    """Unit name -> its top modules, in forward order."""
    blocks = {f"blocks.{i}": [block] for i, block in enumerate(model.blocks)}
    if model.config.tie_weights:
        return {"root": [model], **blocks}
    return {"root": [model], "wte": [model.wte], **blocks, "head": [model.ln_f, model.lm_head]}


def _mixed_precision(config: TrainerConfig) -> MixedPrecisionPolicy:
    if config.param_dtype == "float32":
        return MixedPrecisionPolicy()
    # Gradients are added over the ranks in fp32: sums in bf16 lose what small gradients carry.
    return MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32)


def _tune_communication(units: Units, device_type: str) -> None:
    """What an expert sets on FSDP2, so that compressors are compared with a strong baseline."""
    by_name = dict(units)
    root = by_name["root"]
    if "wte" in by_name:
        # The gradient of a lookup needs the token ids, not the table: backward need not gather it again.
        by_name["wte"].set_unshard_in_backward(False)
    if hasattr(root, "set_reduce_scatter_unused_params"):
        # Every reduction then holds every parameter of its unit, on all ranks and in every step.
        root.set_reduce_scatter_unused_params(True)
    if device_type != "cuda":
        return  # CPU collectives run in line: there is no stream to run ahead on
    if hasattr(root, "set_separate_reduce_scatter_group"):  # torch >= 2.13
        root.set_separate_reduce_scatter_group(True)
        root.set_reduce_scatter_max_input_buffers(2)
    # FSDP2 gathers the next unit behind the current one by itself, in forward only as fast as Python gets there; naming
    # the unit lets the gather start before the current unit's kernels are launched. Backward's default is already so.
    for (_, module), (_, following) in itertools.pairwise(units):
        module.set_modules_to_forward_prefetch([following])
