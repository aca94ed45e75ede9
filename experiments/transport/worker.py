"""What the ranks of the transport experiment do: exchanges and gloo's own collectives in turn, then whole steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tagc.api import compress
from tagc.comm.exchange import Exchange
from tagc.compressors.base import Part
from tagc.config import Config
from tagc.model.gpt import GPT
from tagc.model.init import materialize
from tagc.network import Link, build_link
from tagc.train.optimizer import build_optimizer, clip_gradients
from tagc.train.parallel import shard_model
from tagc.train.process_group import start_process_group

CPU = torch.device("cpu")
SECONDS = 0.2  # every operation moves what the link carries in this time, in each direction
ROUNDS, WARMUP_STEPS, STEPS = 9, 1, 6
VOCAB = 4096


def run_rank(config: Config, data: Any, run_dir: str) -> None:
    """Measure both; rank 0 leaves the rows in the summary."""
    start_process_group(config, CPU)
    link = build_link(config.bandwidth, config.network, dist.get_rank())
    rows = [*_time_operations(link), *_time_steps(config, link)]
    if dist.get_rank() == 0:
        Path(run_dir, "summary.json").write_text(json.dumps({"status": "done", "rows": rows}))
    dist.destroy_process_group()


def _time_together(work: Callable[[], Any], link: Link) -> dict[str, float]:
    """Seconds until the slower rank is through, from a common start, and what this rank's interface sent meanwhile."""
    dist.barrier()
    before = link.read_counters()
    begin_s = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - begin_s)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    after = link.read_counters()
    assert before is not None and after is not None
    return {"seconds": seconds.item(), "wire_bytes": after.sent_bytes - before.sent_bytes}


def _time_operations(link: Link) -> Iterator[dict[str, Any]]:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None and link.rate_bytes_per_s is not None
    numel = int(link.rate_bytes_per_s * SECONDS / 4)
    rows, gathered, own = torch.ones(ranks, numel), torch.ones(ranks * numel), torch.ones(numel)
    received = torch.ones(ranks, numel)
    exchange = Exchange(Link(), CPU)
    arms: dict[tuple[str, str], Callable[[], Any]] = {
        ("reduce_scatter", "exchange"): lambda: exchange.reduce_scatter([Part(rows, "sum", "value")], group),
        ("reduce_scatter", "gloo"): lambda: dist.reduce_scatter_single(own, rows.view(-1)),
        ("all_gather", "exchange"): lambda: exchange.all_gather(gathered, own, group, "param"),
        ("all_gather", "gloo"): lambda: dist.all_gather_single(gathered, own),
        ("all_to_all", "gloo"): lambda: dist.all_to_all_single(received, rows),
    }
    payload_bytes = (ranks - 1) * numel * 4
    for round_ in range(-1, ROUNDS):  # the first makes connections and touches memory
        for (operation, transport), work in arms.items():
            timing = _time_together(work, link)
            if round_ >= 0:
                yield {"what": operation, "transport": transport, "payload_bytes": payload_bytes, **timing}


class _Arm:
    """A model under FSDP2 with its own copy of everything, on gloo's collectives or on the exchange."""

    def __init__(self, config: Config, through_exchange: bool) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            self.model = GPT(config.model, VOCAB)
        shard_model(self.model, config.trainer, init_device_mesh("cpu", (dist.get_world_size(),)))
        materialize(self.model, config.seed, CPU)
        self.optimizer = build_optimizer(self.model, config.trainer)
        if through_exchange:
            compress(
                *(self.model, self.optimizer),
                gradients=config.compressor,
                kernels="reference",
                overlap=config.trainer.overlap,
            )
        self.tokens = torch.randint(VOCAB, (config.micro_batch, config.model.context + 1))

    def step(self) -> None:
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        clip_gradients(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _time_steps(config: Config, link: Link) -> Iterator[dict[str, Any]]:
    arms = {"exchange": _Arm(config, True), "gloo": _Arm(config, False)}
    for number in range(WARMUP_STEPS + STEPS):
        for transport, arm in arms.items():
            timing = _time_together(arm.step, link)
            if number >= WARMUP_STEPS:
                yield {"what": "fsdp_step", "transport": transport, "payload_bytes": None, **timing}
