"""A tiny model, and one way to train it that serves sharded and plain runs alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tagc.config import ModelConfig, TrainerConfig
from tagc.model.gpt import GPT
from tagc.model.init import materialize
from tagc.train.optimizer import build_optimizer, clip_gradients
from tagc.train.parallel import Units, shard_model

VOCAB = 61  # with the odd width, no dimension divides by 2 or 3 ranks; two positions leave the third rank none
TINY: dict[str, Any] = {"layers": 2, "width": 35, "heads": 5, "context": 16}
GLOBAL_BATCH = 12


def build_plain(seed: int = 0, **model: Any) -> GPT:
    with torch.device("meta"):
        gpt = GPT(ModelConfig(**(TINY | model)), VOCAB)
    materialize(gpt, seed, "cpu")
    return gpt


def build_sharded(trainer: TrainerConfig, seed: int = 0, **model: Any) -> tuple[GPT, Units]:
    with torch.device("meta"):
        gpt = GPT(ModelConfig(**(TINY | model)), VOCAB)
    units = shard_model(gpt, trainer, init_device_mesh("cpu", (dist.get_world_size(),)))
    materialize(gpt, seed, "cpu")
    return gpt, units


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_parameters(gpt: GPT) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in gpt.named_parameters()}


def global_batch(step: int, context: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (GLOBAL_BATCH, context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(
    gpt: GPT, trainer: TrainerConfig, rank: int = 0, ranks: int = 1, steps: int = 3, accumulation: int = 1
) -> dict[str, Any]:
    """Train on rank ``rank``'s part of each global batch; the first step's gradients and all that followed."""
    optimizer = build_optimizer(gpt, trainer)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        parts = [part[rank::ranks].chunk(accumulation) for part in global_batch(step, gpt.config.context)]
        losses = []
        for micro, (inputs, targets) in enumerate(zip(*parts, strict=True)):
            if hasattr(gpt, "set_requires_gradient_sync"):
                gpt.set_requires_gradient_sync(micro == accumulation - 1)
            loss = gpt(inputs, targets) / accumulation
            loss.backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        if ranks > 1:
            dist.all_reduce(loss)
        result["losses"].append((loss / ranks).item())
        if step == 0:
            result["gradients"] = {name: full(p.grad) for name, p in gpt.named_parameters()}
        result["norms"].append(clip_gradients(gpt.parameters(), trainer.grad_clip))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # validation between steps must not leave anything behind
            with torch.no_grad():
                result["validation_loss"] = gpt(*global_batch(100, gpt.config.context)).item()
    result["parameters"] = full_parameters(gpt)
    return result
