"""A tiny model under FSDP2 with the real gradient exchange, for tests that start ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tagc.api import Laboratory, compress
from tagc.comm.exchange import Exchange
from tagc.comm.stopwatch import Stopwatch
from tagc.config import CompressorConfig, Config, LoggingConfig, ModelConfig, TrainerConfig
from tagc.model.gpt import GPT
from tagc.model.init import materialize
from tagc.network.link import Link
from tagc.train.optimizer import clip_gradients
from tagc.train.parallel import shard_model

VOCAB = 211  # prime: never divisible by the ranks


def tiny_config(name: str = "tagc", ranks: int = 2, **compressor: Any) -> Config:
    """A two-block model whose every matrix is large enough to be compressed."""
    config = Config(
        model=ModelConfig(layers=2, width=48, heads=3, context=16),
        compressor=CompressorConfig(
            **{"name": name, "min_numel": 512, "value_dtype": "float32", "adaptive_ratio": False, "max_load": 0.75}
            | compressor
        ),
        trainer=TrainerConfig(global_batch=12),
        logging=LoggingConfig(fidelity_every=1),
    )
    config.cluster.ranks = ranks
    return config


class TinyRun:
    """One rank's model, exchange and optimizer. ``plain`` leaves FSDP2's own collectives in place."""

    def __init__(
        self, config: Config, plain: bool = False, dtype: torch.dtype = torch.float32, link: Link | None = None
    ) -> None:
        torch.manual_seed(0)
        self.config, self.rank, self.ranks = config, dist.get_rank(), dist.get_world_size()
        device = torch.device("cpu")
        with torch.device("meta"):
            self.model = GPT(config.model, VOCAB).to(dtype)
        units = shard_model(self.model, config.trainer, init_device_mesh("cpu", (self.ranks,)))
        self.units = units
        materialize(self.model, config.seed, device)
        self.exchange = Exchange(link or Link(), device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.sync = None
        if not plain:
            names = {module: name for name, module in units}
            every = config.logging.fidelity_every, config.logging.histograms_every
            self.sync = compress(
                self.model,
                self.optimizer,
                gradients=config.compressor,
                kernels="reference",
                overlap=config.trainer.overlap,
                timeout_s=config.cluster.timeout_s,
                laboratory=Laboratory(self.exchange, Stopwatch(device), names, *every),
            ).sync
        self.report: Any = None

    def local_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows of a global batch that is the same for every number of ranks."""
        generator = torch.Generator().manual_seed(100 + step)
        tokens = torch.randint(VOCAB // 2, (self.config.trainer.global_batch, 17), generator=generator)
        mine = tokens.chunk(self.ranks)[self.rank]
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()

    def backward(self, step: int, accumulation: int = 1) -> torch.Tensor:
        """Forward, backward and, unless plain, the end of the gradient step. Returns this rank's loss."""
        if self.sync:
            self.exchange.take_sent_bytes()
            self.sync.begin_step(step)
        inputs, targets = self.local_batch(step)
        total = torch.zeros(())
        for i, (x, y) in enumerate(zip(inputs.chunk(accumulation), targets.chunk(accumulation), strict=True)):
            self.model.set_requires_gradient_sync(i == accumulation - 1)
            loss = self.model(x, y) / accumulation
            total += loss.detach()
            if self.sync:
                self.sync.tell(total)
            loss.backward()
        if self.sync:
            self.report = self.sync.take_report()
        return total

    def update(self) -> float:
        """Clip and step. Returns the global gradient norm."""
        norm = clip_gradients(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Reduced gradients by name, gathered from the shards."""
        return {name: p.grad.full_tensor().clone() for name, p in self.model.named_parameters() if p.grad is not None}
