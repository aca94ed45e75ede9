"""Part 4: training steps of GPT-2 124M on one GPU as one of two ranks: real computation, encode and decode, paced link.

The process group is torch's fake one: it moves nothing, so the peer's messages are this rank's own, and the link's
delay is queued on a stream (tagc/network/stream_pacing.py). Tokens are random. All arms are held at once and take
turns, step by step. ``exposed``: an arm's median over that of ``noop`` without a cap, which waits for nobody.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from experiments.gpu_check.rows import Part, load_kernels, load_option, run_part
from tagc.comm import exchange
from tagc.config import BandwidthConfig, CompressorConfig, Config, ModelConfig, NetworkConfig, TrainerConfig, validate
from tagc.data import DataInfo
from tagc.data.tokens import write_tokens
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.train.trainer import Trainer

ARMS = ("noop", "fsdp", "bf16", "tagc", "tagc2", "packed")
RATES_GBPS = (None, 100, 40, 10)
RANKS, WARM_UP, ROUNDS, MIN_ROUNDS = 2, 10, 40, 3
SPANS = ("encode_ms", "exchange_ms", "decode_ms")


def make_config(compressor: str, tiny: bool) -> Config:
    """The paper's model without weight tying, or one that Triton's interpreter can train."""
    model = {"layers": 1, "width": 16, "heads": 1, "context": 8, "name": "tiny"}
    if not tiny:
        model = load_option("model", "gpt2") | {"context": 512}
    config = Config(
        model=ModelConfig(**model, bias=False),
        compressor=CompressorConfig(**load_option("compressor", compressor)),
        bandwidth=BandwidthConfig("100gbps", 100_000),  # a capped link, whose rate is then set step by step
        network=NetworkConfig(time_dilation=1),
        trainer=TrainerConfig(global_batch=RANKS * (1 if tiny else 6), learning_rate=6e-4),
    )
    config.cluster.ranks = RANKS
    config.data.vocab_size = 64 if tiny else 50304
    if tiny:
        config.compressor.min_numel = 512
    return validate(config)


def write_random_tokens(folder: Path, config: Config) -> DataInfo:
    """Training and validation files."""
    count = 64 * (config.model.context + 1)
    ids = np.random.default_rng(0).integers(config.data.vocab_size, size=count)
    for split in ("train", "val"):
        with (folder / f"{split}.bin").open("wb") as file:
            write_tokens(file, ids)
    train, val = ((str(folder / f"{split}.bin"),) for split in ("train", "val"))
    return DataInfo(train, val, config.data.vocab_size, count, count, "random", "random tokens")


def send_to_self(output: torch.Tensor, input: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """An all-to-all in which every peer sends what it gets. (In torch 2.11 the fake group moves nothing.)"""
    output.copy_(input)


def reduce_from_self(output: torch.Tensor, input: torch.Tensor, *, op: dist.ReduceOp, group: dist.ProcessGroup) -> None:
    """A reduce-scatter in which every peer sends this rank what it keeps for itself."""
    torch.mul(input.view(group.size(), -1)[group.rank()], group.size(), out=output)


@contextmanager
def pretend_ranks(device: torch.device) -> Iterator[None]:
    """A process group of RANKS ranks of which this process is the first and only one."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", send_to_self))
        stack.enter_context(mock.patch.object(exchange, "_reduce_scatter_single", reduce_from_self))
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, as the papers' runs
        yield
    dist.destroy_process_group()


class Arm:
    """One compressor's trainer."""

    def __init__(self, name: str, part: Part, data: DataInfo) -> None:
        self.name, self.steps = name, 0
        self.trainer = Trainer(make_config(name, part.is_cpu), data, part.device, load_kernels())

    def step(self, rate_gbps: float | None) -> dict[str, Any]:
        """One step at this rate; returns its row of metrics."""
        self.trainer.exchange.link.set_rate(rate_gbps * 1e9 / 8 if rate_gbps else None)
        row = self.trainer.train_step(self.steps)
        self.steps += 1
        return row


def take_turns(part: Part, arms: list[Arm], warm_up: int) -> dict[tuple[str, Any], list[dict[str, Any]]]:
    """Rows of metrics by arm and rate. Every sample is written at once; no round starts after the deadline."""
    for arm in arms:
        for _ in range(warm_up):
            arm.step(None)
    rows = defaultdict(list)
    for round_ in range(1 if part.is_cpu else ROUNDS):
        if round_ >= MIN_ROUNDS and time.monotonic() > part.deadline_s:
            break
        for rate in RATES_GBPS[:2] if part.is_cpu else RATES_GBPS:
            for arm in arms:
                row = arm.step(rate)
                rows[arm.name, rate].append(row)
                setting = {"gbps": rate or "unlimited", "step": arm.steps}
                part.add_row(arm.name, setting, "iteration_sample", "ms", round(row["iteration_ms"], 3))
    return rows


def record(part: Part, rows: dict[tuple[str, Any], list[dict[str, Any]]]) -> None:
    """Medians, exposed time and bytes of every arm and rate."""
    compute_ms = float(np.median([row["iteration_ms"] for row in rows["noop", None]]))
    for (name, rate), samples in rows.items():
        setting = {"gbps": rate or "unlimited"}
        p20, median, p80 = (float(x) for x in np.percentile([row["iteration_ms"] for row in samples], (20, 50, 80)))
        n = len(samples)
        part.add_row(name, setting, "iteration", "ms", round(median, 3), (round(p20, 3), round(p80, 3), n))
        part.add_row(name, setting, "exposed", "ms", round(median - compute_ms, 3), (None, None, n))
        for span in SPANS:
            value = float(np.median([row[span] for row in samples]))
            part.add_row(name, setting, f"busy_{span.removesuffix('_ms')}", "ms", round(value, 3), (None, None, n))
        part.add_row(name, setting, "grad_wire", "bytes", samples[-1]["grad_wire_bytes"], (None, None, n))
        sys.stdout.write(f"{name:<7} {rate or 'no cap':>6} Gbit/s  {median:9.2f} ms ({p20:.2f}-{p80:.2f}, n={n})\n")


def measure(part: Part) -> bool:
    """All arms at all rates."""
    with TemporaryDirectory() as folder, pretend_ranks(part.device):
        data = write_random_tokens(Path(folder), make_config("fsdp", part.is_cpu))
        arms = [Arm(name, part, data) for name in ARMS]
        record(part, take_turns(part, arms, 1 if part.is_cpu else WARM_UP))
    return True


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        run_part("steps", measure)
