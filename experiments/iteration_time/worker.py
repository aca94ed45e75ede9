"""One cell, in every rank: all arms live side by side and take turns, so that a drift of the machine meets all alike.

Each arm makes its first steps on a link without a cap, then one turn there, from which the cell's rate follows. Then
come the blocks: in each, every arm makes one turn of a few steps, in an order that is drawn anew; the first step of a
turn is not timed. An arm's losses are those of a run of its own.
"""

from __future__ import annotations

import json
import logging
import random
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from experiments.iteration_time.arms import OWN_TRANSPORT, build_trainer, count_state_bytes
from experiments.iteration_time.link import Calibration, Rate, describe_link, resolve_rate
from experiments.iteration_time.memory import PeakMemory
from experiments.iteration_time.plan import Cell, parse_link
from tagc.config import Config
from tagc.data import DataInfo
from tagc.errors import UserError
from tagc.host.files import write_text_atomic
from tagc.kernels import resolve_backend
from tagc.model.gpt import flops_per_token
from tagc.record import build_manifest
from tagc.record.rows import MetricsFile, clean_row
from tagc.train.trainer import Trainer
from tagc.train.worker import rank_process

DENSE_ARMS = ("noop", "fsdp", "bf16")

logger = logging.getLogger("tagc")


def run_cell(cell: Cell, configs: dict[str, Config], config: Config, data: DataInfo, run_dir: str) -> None:
    """Measure one cell; rank 0 writes ``metrics.jsonl`` (one row per step) and ``summary.json`` into ``run_dir``.

    configs: of every arm, by name. A :data:`tagc.launch.Worker` once the first two are bound.
    """
    with rank_process(config, run_dir) as device:
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.ERROR)  # the harness has a progress bar on the terminal
        if cell.vocab_size is not None:
            if cell.vocab_size < data.vocab_size:
                raise UserError(f"cell {cell.key}: vocab_size={cell.vocab_size}, but the data has {data.vocab_size}")
            data = replace(data, vocab_size=cell.vocab_size)
        bench = _Bench(cell, configs, data, device, Path(run_dir))
        bench.warm_up()
        bench.set_link(bench.calibrate())
        bench.measure()
        bench.finish(config)


class _Bench:
    def __init__(
        self, cell: Cell, configs: dict[str, Config], data: DataInfo, device: torch.device, run_dir: Path
    ) -> None:
        self._cell, self._configs, self._data, self._device, self._run_dir = cell, configs, data, device, run_dir
        self._kernels_name, self._kernels = resolve_backend(next(iter(configs.values())).kernels, device.type)
        self._trainers: dict[str, Trainer] = {}
        self._steps_done = dict.fromkeys(cell.arms, 0)
        self._memory: dict[str, dict[str, int | None]] = {}
        self._link: dict[str, Any] = {}
        self._metrics = MetricsFile(run_dir / "metrics.jsonl") if dist.get_rank() == 0 else None

    def warm_up(self) -> None:
        """Build the arms one by one, each with its first steps, and note the memory that each takes."""
        for arm in self._cell.arms:
            peak = PeakMemory()
            self._trainers[arm] = build_trainer(arm, self._configs[arm], self._data, self._device, self._kernels)
            self._take_turn(arm, "warm-up", 0, self._cell.warmup_steps)
            self._memory[arm] = {"peak_rss_bytes": peak.read()}

    def calibrate(self) -> Calibration:
        """One turn of every arm without a cap; computation is that of the dense arms.

        In CPU time, which is what a quiet machine takes: other processes' share of the cores must not move the link.
        """
        rows = {arm: self._take_turn(arm, "uncapped", 0, self._cell.uncapped_steps) for arm in self._cell.arms}
        dense = [row for arm in DENSE_ARMS if arm in rows for row in rows[arm][1:] or rows[arm]]
        compute_ms = torch.tensor(median(row["compute_cpu_ms"] for row in dense), dtype=torch.float64)
        dist.all_reduce(compute_ms)  # all ranks must set the same rate
        compute_ms /= self._cell.ranks
        config, trainer = self._configs["fsdp"], self._trainers["fsdp"]
        tokens = self._cell.reference_tokens or config.trainer.global_batch * config.model.context
        flops = flops_per_token(trainer.model) * tokens / self._cell.ranks
        return Calibration(compute_ms.item() / 1e3, rows["fsdp"][-1]["wire_bytes"], flops)

    def set_link(self, measured: Calibration) -> None:
        """Put the cap in force."""
        spec = parse_link(self._cell.link)
        rate: Rate = resolve_rate(spec, measured, self._configs["fsdp"])
        self._link = describe_link(spec, measured, rate)
        for trainer in self._trainers.values():
            trainer.exchange.link.set_rate(rate.bytes_per_s)
        dist.barrier()

    def measure(self) -> None:
        """All blocks."""
        order = random.Random(self._cell.key)  # the same on all ranks
        for block in range(self._cell.blocks):
            for arm in order.sample(self._cell.arms, len(self._cell.arms)):
                self._take_turn(arm, "blocks", block, self._cell.block_steps)

    def _take_turn(self, arm: str, phase: str, block: int, steps: int) -> list[dict[str, Any]]:
        trainer, rows = self._trainers[arm], []
        for turn_step in range(steps):
            row = trainer.train_step(self._steps_done[arm])
            self._steps_done[arm] += 1
            place = {"step": self._steps_done[arm], "arm": arm, "phase": phase, "block": block, "turn_step": turn_step}
            rows.append(place | row)
            if self._metrics:
                self._metrics.append(clean_row(rows[-1]))
        return rows

    def finish(self, config: Config) -> None:
        """Rank 0 writes where the numbers come from."""
        if self._metrics is None:
            return
        self._metrics.close()
        for arm, trainer in self._trainers.items():
            self._memory[arm] |= count_state_bytes(trainer)
        summary = {
            "status": "done",
            "cell": asdict(self._cell),
            "link": self._link,
            "memory": self._memory,
            "expected_gradient_bytes": {arm: self._expected_gradient_bytes(arm) for arm in self._cell.arms},
            "threads_per_rank": torch.get_num_threads(),
            **build_manifest(config, kernels=self._kernels_name, device=str(self._device)),
        }
        write_text_atomic(self._run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _expected_gradient_bytes(self, arm: str) -> int | None:
        if arm not in OWN_TRANSPORT:
            return None
        return sum(self._trainers[arm].sync.expected_bytes(self._steps_done[arm]).values())
