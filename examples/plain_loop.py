"""A plain FSDP2 loop with compressed gradients: torchrun --nproc-per-node 2 examples/plain_loop.py"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tagc


def build_model() -> nn.Sequential:
    """An embedding, three blocks and a head."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(97, 64), *blocks, nn.Linear(64, 97))


def main(steps: int = 20) -> None:
    """Learn to count modulo 97."""
    dist.init_process_group("gloo")
    model = build_model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compression = tagc.compress(model, optimizer, gradients="tagc2", layers="all", min_numel=1024, sparsity=0.8)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        numbers = torch.randint(97, (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(numbers), (numbers + 1) % 97)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            sent = compression.metrics()["grad_wire_bytes"]
            print(f"step {step + 1}: loss {loss.item():.3f}, {sent:,} bytes sent")  # noqa: T201
    if dist.get_rank() == 0:
        print(compression.report())  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
