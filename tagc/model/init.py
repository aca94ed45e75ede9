"""Initial values that depend on the seed and the parameter's name, and on nothing else.

Each parameter has a random generator of its own, on the CPU. So the same seed gives the same model on 1, 2 or 3 ranks,
on CPU and GPU, in whatever units the parameters are sharded, and adding a parameter leaves the others as they were.
No rank talks to another, and no more than one whole parameter is in memory at a time.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tagc.model.gpt import GPT

WEIGHT_STD = 0.02  # Radford et al. (2019)


def materialize(model: GPT, seed: int, device: torch.device | str) -> None:
    """Allocate a model that was built on the meta device and fill it, in place.

    Works before or after ``fully_shard``; each rank keeps its own shard. Tied weights stay tied. The model has no
    buffers, so parameters are all there is to restore.
    """
    model.to_empty(device=torch.device(device))
    model.tie_weights()  # `to_empty` allocates each module's plain parameters separately, which unties them
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            copy_full_value(parameter, initial_value(name, parameter.shape, seed, model.config.layers))


def initial_value(name: str, shape: torch.Size, seed: int, layers: int) -> Tensor:
    """The whole initial value of one parameter: fp32, on the CPU.

    GPT-2's scheme: normal with standard deviation 0.02; divided by sqrt(2 * layers) for the two projections per block
    that add to the residual stream, so that its variance does not grow with depth; norms start at one, biases at zero.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = WEIGHT_STD / math.sqrt(2 * layers) if name.endswith("proj.weight") else WEIGHT_STD
    generator = torch.Generator("cpu").manual_seed(_seed_of(name, seed))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def copy_full_value(parameter: Tensor, full: Tensor) -> None:
    """Copy a whole CPU tensor into a plain parameter, or this rank's part into a sharded one, without communication."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    mesh = parameter.device_mesh
    # `src_data_rank=None`: every rank already holds the same values, so each takes its part and nothing is sent.
    part = distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())


def _seed_of(name: str, seed: int) -> int:
    """32 bits, which is all that torch's CPU generator uses, from a hash that is the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "little")
