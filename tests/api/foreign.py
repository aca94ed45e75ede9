"""A model that is not ours, sharded in every way that FSDP2 allows, and a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import tagc

CLASSES, WIDTH = 31, 24


class Gate(nn.Module):
    """Parameters with fewer rows than ranks: one element, and one row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.row


class Block(nn.Module):
    """A residual block; ``recompute`` checkpoints its activations: "reentrant", "hooks" or None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gate = Gate()
        self.recompute: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return x + checkpoint(self._inner, x, use_reentrant=self.recompute == "reentrant")
        return x + self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.gate(self.down(torch.tanh(self.up(self.norm(x)))))


class Foreign(nn.Module):
    """An embedding, two blocks, a branch that only some steps take, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.final = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor, branch: bool = True) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if branch:
            x = x + self.branch(x)
        return self.head(self.final(x))


def shard(model: Foreign, way: str, mesh: DeviceMesh | None = None) -> Foreign:
    """Shard in one of the ways of ``WAYS``, in place."""
    keys: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    if way == "mixed precision":
        keys["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if way == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("down" in name or "branch" in name)
    if way == "tied":
        model.head.weight = model.embed.weight
    for layer in model.layers:
        layer.recompute = {"reentrant": "reentrant", "recomputed": "hooks"}.get(way)  # type: ignore[assignment]
    if way == "nested":
        for layer in model.layers:
            fully_shard(layer.gate, **keys)
            fully_shard(layer.up, **keys)
    if way == "asleep":
        fully_shard(model.branch, **keys)
        fully_shard(model.final, **keys)
    if way == "listed":
        fully_shard([model.layers[0], model.layers[1]], **keys)
        fully_shard([model.final, model.head], **keys)
    elif way == "half gathered":  # over half of the ranks: backward gathers parts of what forward gathered
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=dist.get_world_size() // 2, **keys)
    elif way not in ("one unit",):
        fully_shard(model.embed, **keys) if way == "embedding alone" else None
        for layer in model.layers:
            fully_shard(layer, **keys)
    fully_shard(model, **keys)
    return model


WAYS = (
    *("by block", "embedding alone", "one unit", "listed", "nested", "frozen", "tied"),
    *("recomputed", "reentrant", "mixed precision", "accumulation", "zeroed in place", "unused", "asleep"),
)


class Loop:
    """A model under FSDP2, its optimizer, and, with ``options``, its compression."""

    def __init__(
        self, way: str = "by block", options: dict[str, Any] | None = None, mesh: DeviceMesh | None = None
    ) -> None:
        torch.manual_seed(3)
        self.way, self.model = way, shard(Foreign(), way, mesh)
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=3e-3)
        self.compression: tagc.Compression | None = None
        if options is not None:
            self.compression = tagc.compress(self.model, self.optimizer, **{"kernels": "reference", **options})
        else:
            self.model.set_reduce_scatter_unused_params(True)  # as tagc.compress does

    def step(self, step: int, after_backward: Callable[[], None] = lambda: None) -> float:
        """One optimizer step on this rank's batch of ``step``. Returns its loss."""
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        tokens = torch.randint(CLASSES, (8, 5), generator=generator)
        parts = tokens.chunk(2 if self.way == "accumulation" else 1)
        total = 0.0
        for i, part in enumerate(parts):
            self.model.set_requires_gradient_sync(i == len(parts) - 1)  # type: ignore[attr-defined]
            logits = self.model(part, branch=self._takes_branch(step))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), (part.flatten() + 1) % CLASSES) / len(parts)
            loss.backward()
            total += loss.item()
        after_backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.way != "zeroed in place")
        return total

    def _takes_branch(self, step: int) -> bool:
        return self.way != "asleep" and (self.way != "unused" or step % 2 == 0)

    def train(self, steps: int, first: int = 0) -> list[float]:
        """The losses of ``steps`` steps."""
        return [self.step(step) for step in range(first, first + steps)]

    def shards(self) -> dict[str, Tensor]:
        """This rank's part of every parameter."""
        return {name: p.to_local().detach().clone() for name, p in self.model.named_parameters()}  # type: ignore
