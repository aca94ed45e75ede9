"""The training loop: one optimizer step is accumulate, reduce once, close the step, clip, update, record."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tagc.api import Laboratory, compress
from tagc.comm.buckets import describe_policy
from tagc.comm.exchange import Exchange
from tagc.comm.gradient_sync import GradientSync
from tagc.comm.policy import format_policy
from tagc.comm.step_close import nonfinite_message
from tagc.comm.stopwatch import Stopwatch
from tagc.config import Config
from tagc.data import DataInfo, TrainLoader, open_tokens, validation_batch
from tagc.errors import UserError
from tagc.model.gpt import GPT, flops_per_token, parameter_count
from tagc.model.init import materialize
from tagc.network import Counters, build_link
from tagc.network.calibration import LinkScale, oversubscription
from tagc.record import NullRecorder
from tagc.train.checkpoint import Checkpoints
from tagc.train.optimizer import build_optimizer, clip_gradients, learning_rate_at
from tagc.train.parallel import shard_model
from tagc.train.profile import StepProfiler

logger = logging.getLogger("tagc")


class Trainer:
    """Model, optimizer, data and gradient exchange of one rank."""

    def __init__(self, config: Config, data: DataInfo, device: torch.device, kernels: ModuleType) -> None:
        self.config, self.device = config, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(config.seed * 1_000_003 + self.rank)  # dropout; weights and data have seeds of their own
        self.stopwatch = Stopwatch(device)
        self.exchange = Exchange(build_link(config.bandwidth, config.network, self.rank), device)
        self._data_description = data.description
        self._build_model(data.vocab_size, kernels)
        self._open_data(data)
        self.step = 0  # finished optimizer steps
        self.stop_requested: Callable[[], bool] = lambda: False  # asked once per step; one rank's yes stops all
        self.is_stopping = False
        self.layer_rows: list[dict[str, Any]] = []  # of the last step's layers, every logging.histograms_every steps
        flops = flops_per_token(self.model) * config.trainer.global_batch * config.model.context / self.ranks
        self.link_scale = LinkScale(config, self.exchange.link, flops, device.type, self._largest_over_ranks)

    def _build_model(self, vocab_size: int, kernels: ModuleType) -> None:
        with torch.device("meta"):
            self.model = GPT(self.config.model, vocab_size)
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        self.units = shard_model(self.model, self.config.trainer, mesh)
        materialize(self.model, self.config.seed, self.device)
        self.optimizer = build_optimizer(self.model, self.config.trainer)
        self.sync = self._build_sync(kernels)

    def _build_sync(self, kernels: ModuleType) -> GradientSync:
        config = self.config
        names = {module: name for name, module in self.units}
        every = config.logging.fidelity_every, config.logging.histograms_every
        return compress(
            self.model,
            self.optimizer,
            gradients=config.compressor,
            weights=config.weights,
            kernels=kernels,
            seed=config.seed,
            overlap=config.trainer.overlap,
            timeout_s=config.cluster.timeout_s,
            laboratory=Laboratory(self.exchange, self.stopwatch, names, *every),
        ).sync

    def _open_data(self, data: DataInfo) -> None:
        context = self.config.model.context
        self._loader = TrainLoader(
            open_tokens(data, "train"),
            context,
            self.config.trainer.global_batch,
            self.rank,
            self.ranks,
            self.config.seed,
        )
        self.batches = iter(self._loader)
        inputs, targets = validation_batch(open_tokens(data, "val"), context, self.config.data.val_sequences)
        # Every rank takes part in every forward pass, so each validates the same number of sequences: the last ones
        # are filled up by repetition and weighed zero.
        share = math.ceil(len(inputs) / self.ranks)
        position = torch.arange(self.rank * share, (self.rank + 1) * share)
        self._val_weight = (position < len(inputs)).float()
        position = position.clamp(max=len(inputs) - 1)
        self._val_inputs, self._val_targets = inputs[position], targets[position]

    def log_start(self, kernels_name: str) -> None:
        """Say what is about to run: model, link, and what the layer policy does to the gradient traffic."""
        if self.rank != 0:
            return
        config = self.config
        logger.info(
            "%s, %s parameters, %d rank(s) on %s, compressor %s (kernels %s), bandwidth %s%s",
            config.model.name,
            f"{parameter_count(self.model):,}",
            self.ranks,
            self.device.type,
            config.compressor.name,
            kernels_name,
            config.bandwidth.label,
            self.link_scale.describe(),
        )
        logger.info("%s", self._data_description)
        if self.ranks == 1:
            logger.info("one rank has nobody to exchange gradients with: the compressor is not used")
            return
        for line in format_policy(describe_policy(self.sync.buckets)):
            logger.info("%s", line)
        logger.info("residuals take %.2f MB on each rank", self.sync.residual_bytes / 1e6)
        if config.weights.name != "full":
            logger.info("%s", self.sync.weights.describe())
        for line in self.sync.explain_dense():
            logger.warning("%s", line)

    def load_data_state(self, state: dict[str, Any]) -> None:
        """Go on after the batch that came with ``state``. Errors: ``UserError`` if it belongs to other data."""
        self._loader.load_state(state)

    def train(self, recorder: NullRecorder, profiler: StepProfiler, checkpoints: Checkpoints | None = None) -> None:
        """Run the steps that are left, until the last or until a rank is asked to stop (then ``is_stopping``).

        Errors: ``UserError`` on every rank when a gradient is NaN or Inf.
        """
        settings, first = self.config.trainer, self.step
        for step in range(first, settings.max_steps):
            row = profiler.run(self.train_step, step)
            if first and step < first + settings.timing_warmup_steps:
                row["resumed"] = True  # this process warms up again
            if (step + 1) % settings.eval_every == 0 or step + 1 == settings.max_steps:
                row["val_loss"] = self.validate()
            if checkpoints is not None:
                row["checkpoint_ms"] = checkpoints.take_blocked_ms()  # between the step before and this one
            recorder.layers([{"step": step + 1, **layer} for layer in self.layer_rows])
            recorder.step({"step": step + 1, **row})
            self.step = step + 1
            if checkpoints is not None and (checkpoints.is_due(self.step) or self.is_stopping):
                checkpoints.save(self)  # after the row, so that the record holds every step that is continued
            if self.is_stopping:
                break
        profiler.close()

    def train_step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns its row of metrics. Times are wall times of this rank, in milliseconds."""
        self._synchronize()
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        self.stopwatch.take()
        counters = self.exchange.link.read_counters()
        self.sync.begin_step(step)
        self._accumulate_gradients()
        report = self.sync.take_report()
        self.is_stopping, self.layer_rows = report.stop, report.layers
        for message in report.messages:
            if self.rank == 0:
                logger.warning("step %d: %s", step + 1, message)
        grad_norm = clip_gradients(self.model.parameters(), self.config.trainer.grad_clip).item()
        if not math.isfinite(grad_norm):
            raise UserError(nonfinite_message(step, self._nonfinite_parameters(), [self.rank]))
        rate = learning_rate_at(step, self.config.trainer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._synchronize()
        elapsed_ms, elapsed_cpu_ms = (time.perf_counter() - begin_s) * 1e3, (time.thread_time() - begin_cpu_s) * 1e3
        row = {
            "train_loss": report.loss,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "tokens": self.config.trainer.global_batch * self.config.model.context,
            **self._split_time(elapsed_ms, elapsed_cpu_ms),
            **self._count_bytes(),
            **self._count_link_bytes(counters),
            **report.metrics,
        }
        return row | self.link_scale.close_step(row, self.config.trainer.max_steps - step - 1)

    def _accumulate_gradients(self) -> None:
        """Forward and backward over this rank's micro-batches; only the last one reduces, and shares the mean loss."""
        (inputs, targets), self.data_state = next(self.batches)
        model: Any = self.model  # sharding gave it methods that GPT does not declare
        micro, count = self.config.micro_batch, self.config.accumulation
        total = torch.zeros((), device=self.device)
        for i in range(count):
            is_last = i == count - 1
            model.set_requires_gradient_sync(is_last)
            if not self.config.trainer.reshard_after_forward:
                model.set_reshard_after_backward(is_last)  # gathered once per step, for the memory it costs
            rows = slice(i * micro, (i + 1) * micro)
            loss = model(inputs[rows].to(self.device), targets[rows].to(self.device)) / count
            total += loss.detach()
            if is_last:
                self.sync.tell(total, stop=self.stop_requested())
            loss.backward()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the fixed validation sequences, each token weighed alike, the same on every rank."""
        self.model.eval()
        self.exchange.metered = False
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        micro = self.config.micro_batch
        for i in range(0, len(self._val_inputs), micro):
            weight = self._val_weight[i : i + micro].to(self.device)
            logits = self.model(self._val_inputs[i : i + micro].to(self.device))
            targets = self._val_targets[i : i + micro].to(self.device)
            loss_BT = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
            total += torch.stack([(loss_BT.mean(dim=1) * weight).sum(), weight.sum()])
        for _, unit in self.units:
            unit.reshard()  # units that stay gathered after forward: training steps must all gather alike
        dist.all_reduce(total)
        self.model.train()
        self.exchange.metered = True
        return (total[0] / total[1]).item()

    def _split_time(self, elapsed_ms: float, elapsed_cpu_ms: float) -> dict[str, float]:
        """Where the step's time went. Busy times may overlap; ``exposed_comm_ms`` is what computation waited for.

        On the CPU, iteration = compute + exposed communication. On CUDA host time says nothing about either. The
        ``_cpu_ms`` are CPU time: what a step would take with a core to itself. Where ranks share cores all the time,
        ``compute_cpu_ms`` counts that in.
        """
        spans = self.stopwatch.take()
        diagnostic_ms = spans.get("diagnostic", 0.0)
        row = {
            "iteration_ms": elapsed_ms - diagnostic_ms,
            "encode_ms": spans.get("encode", 0.0),
            "exchange_ms": spans.get("exchange", 0.0) + spans.get("gather", 0.0),
            "gather_ms": spans.get("gather", 0.0),  # the part of exchange_ms that gathers parameters
            "decode_ms": spans.get("decode", 0.0),
        }
        if self.device.type == "cpu":
            row["exposed_comm_ms"] = spans.get("exposed", 0.0) - diagnostic_ms
            row["compute_ms"] = row["iteration_ms"] - row["exposed_comm_ms"]
            share = oversubscription(torch.get_num_threads())
            row["compute_cpu_ms"] = (elapsed_cpu_ms - spans.get("exposed_cpu", 0.0)) * share
            row |= {f"{name}_cpu_ms": spans.get(f"{name}_cpu", 0.0) * share for name in ("encode", "decode")}
        return row

    def _count_bytes(self) -> dict[str, int]:
        sent = self.exchange.take_sent_bytes()
        row = {f"{kind}_wire_bytes": sent.get(kind, 0) for kind in ("value", "index", "return", "param")}
        row["grad_wire_bytes"] = row["value_wire_bytes"] + row["index_wire_bytes"] + row["return_wire_bytes"]
        row["wire_bytes"] = row["grad_wire_bytes"] + row["param_wire_bytes"]
        return row

    def _count_link_bytes(self, before: Counters | None) -> dict[str, int]:
        """What the interface counted since ``before``: headers, acknowledgements and control messages included."""
        now = self.exchange.link.read_counters()
        if before is None or now is None:
            return {}
        return {f"link_{name}": end - begin for name, begin, end in zip(now._fields, before, now, strict=True)}

    def _largest_over_ranks(self, number: float) -> float:
        own = torch.tensor([number], dtype=torch.float64, device=self.device)
        world = dist.group.WORLD
        assert world is not None  # the process group exists as long as a trainer does
        return self.exchange.gather_numbers(own, world).max().item()

    def _nonfinite_parameters(self) -> list[str]:
        """Parameters whose gradient on this rank is not finite; if only the norm overflowed, the largest gradient's."""
        largest = {
            name: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).abs().max().item()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        nonfinite = [name for name, value in largest.items() if not math.isfinite(value)]
        return nonfinite or [max(largest, key=lambda name: largest[name])]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
