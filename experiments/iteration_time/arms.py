"""The arms that are compared: what a compressor's name means, and what a user would pick instead of it.

Every arm is a :class:`~tagc.train.trainer.Trainer`: the same model, data, optimizer, clipping and batch. The arms of
``OTHER_TRANSPORT`` leave communication to torch; it moves their bytes with gloo's own collectives, which fill about
half of a full-duplex link, so they say something about a link only where all traffic is capped (namespaces).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tagc.comm.exchange import Exchange
from tagc.comm.step_close import StepReport
from tagc.config import COMPRESSORS, Config, ModelConfig
from tagc.data import DataInfo
from tagc.errors import UserError
from tagc.model.gpt import GPT, parameter_count
from tagc.model.init import materialize
from tagc.train.optimizer import build_optimizer
from tagc.train.trainer import Trainer

_ZEROPP = ("compressor=int4", "compressor.error_feedback=false", "weights=int8", "weights.block=8000")
#: arms that are more than a compressor's name. ``zeropp``: qwZ (8-bit weights in every gather, blocks as in DeepSpeed)
#: and qgZ (4-bit gradients, no error feedback), one hop, as a flat network has no nodes. ``zeropp_hpz``: besides, hpZ
#: with a rank as a node, which keeps what forward gathered. ``sdp4bit``: 4-bit weight differences in groups of 2048
#: and 4-bit gradients in groups of 128 without error feedback, but without the Hadamard transform of the gradients,
#: which changes no byte.
RECIPES = {
    "int4_delta4": ("compressor=int4", "weights=delta4"),
    "zeropp": _ZEROPP,
    "zeropp_hpz": (*_ZEROPP, "trainer.reshard_after_forward=false"),
    "sdp4bit": (
        *("compressor=int4", "compressor.error_feedback=false", "compressor.block=128"),
        *("weights=delta4", "weights.block=2048"),
    ),
}
POWERSGD_RANKS = {"powersgd1": 1, "powersgd4": 4}
#: torch's own communication: FSDP2 without our hooks; DDP, plain and with torch's PowerSGD
OTHER_TRANSPORT = ("fsdp_gloo", "ddp", *POWERSGD_RANKS)
#: what this project's exchange carries, and counts
OWN_TRANSPORT = (*COMPRESSORS, *RECIPES)
ARMS = (*OWN_TRANSPORT, *OTHER_TRANSPORT)


def arm_overrides(arm: str) -> list[str]:
    """Hydra overrides that choose the arm. Errors: ``UserError`` for an unknown name."""
    if arm not in ARMS:
        raise UserError(f"arm {arm} is unknown; legal: {', '.join(ARMS)}")
    return list(RECIPES.get(arm, (f"compressor={arm if arm in COMPRESSORS else 'fsdp'}",)))


def build_trainer(arm: str, config: Config, data: DataInfo, device: torch.device, kernels: ModuleType) -> Trainer:
    """The arm's trainer on this rank; all ranks must build their arms in the same order."""
    if arm in OWN_TRANSPORT:
        return Trainer(config, data, device, kernels)
    if arm == "fsdp_gloo":
        return OwnCollectivesTrainer(config, data, device, kernels)
    return DdpTrainer(config, data, device, kernels, POWERSGD_RANKS.get(arm))


class TorchSync:
    """Stands where the gradient exchange stands, and leaves the work to torch: only the loss is averaged here."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.buckets: list[Any] = []
        self.residual_bytes = self.replica_bytes = 0

    def begin_step(self, step: int) -> None:
        """Nothing to prepare."""

    def tell(self, loss: Tensor, stop: bool = False) -> None:
        """Keep this rank's loss for the report. Nothing stops a run half way."""
        self._loss = loss.detach()

    def take_report(self) -> StepReport:
        """The mean loss over the ranks, in one control message as in every other arm."""
        assert dist.group.WORLD is not None
        losses = self._exchange.gather_numbers(self._loss.view(1).double(), dist.group.WORLD)
        return StepReport(losses.mean().item())


class OwnCollectivesTrainer(Trainer):
    """``fsdp_gloo``: FSDP2 with its own collectives, tuned as the baseline is but for the exchange in a thread."""

    def _build_sync(self, kernels: ModuleType) -> Any:
        return TorchSync(self.exchange)

    def _split_time(self, elapsed_ms: float, elapsed_cpu_ms: float) -> dict[str, float]:
        return {"iteration_ms": elapsed_ms}  # what waits for what inside torch is not to be seen from here

    def _count_bytes(self) -> dict[str, int]:
        return {}  # torch does not say what it sent; the interface's counters do


class _Replica(DistributedDataParallel):
    """DDP with the names by which the trainer knows a model and steers FSDP2."""

    @property
    def config(self) -> ModelConfig:
        return self.module.config

    def set_requires_gradient_sync(self, value: bool) -> None:
        self.require_backward_grad_sync = value  # what DDP's `no_sync` sets

    def set_reshard_after_backward(self, value: bool) -> None:
        """Nothing is sharded."""


class DdpTrainer(OwnCollectivesTrainer):
    """``ddp``: every rank holds the whole model and all optimizer state. ``powersgd<r>``: torch's hook at rank r.

    PowerSGD (Vogels et al., NeurIPS 2019) runs with error feedback and warm start, as torch's defaults; only its
    dense warm-up is cut to the two steps that torch demands, so that no timed step is dense. Its gradients travel in
    one bucket: with more, the hook starts its later all-reduces from gloo's threads in whatever order the earlier ones
    end, and after some hundred steps two ranks meet in different ones and abort.
    """

    def __init__(
        self, config: Config, data: DataInfo, device: torch.device, kernels: ModuleType, powersgd_rank: int | None
    ) -> None:
        if config.trainer.param_dtype != "float32":
            raise UserError(
                f"trainer.param_dtype={config.trainer.param_dtype}: DDP keeps one dtype, there is no gather to shrink; "
                "leave the arms ddp and powersgd out of cells with bfloat16 parameters"
            )
        self._powersgd_rank = powersgd_rank
        self.powersgd: PowerSGDState | None = None
        super().__init__(config, data, device, kernels)

    def _build_model(self, vocab_size: int, kernels: ModuleType) -> None:
        with torch.device("meta"):
            model = GPT(self.config.model, vocab_size)
        materialize(model, self.config.seed, self.device)
        one_bucket_mb = 4 * parameter_count(model) // 2**20 + 1
        self.model = _Replica(
            model, gradient_as_bucket_view=True, bucket_cap_mb=one_bucket_mb if self._powersgd_rank else None
        )
        if self._powersgd_rank:
            self.powersgd = PowerSGDState(None, self._powersgd_rank, start_powerSGD_iter=2)
            self.model.register_comm_hook(self.powersgd, powerSGD_hook)
        self.units = []
        self.optimizer = build_optimizer(self.model, self.config.trainer)
        self.sync = self._build_sync(kernels)


def count_state_bytes(trainer: Trainer) -> dict[str, int]:
    """What this rank holds between steps, in bytes: parameters, their gradients, optimizer state, residuals, replicas.

    Gradients count at their parameters' size: they exist from backward to the optimizer step.
    """
    parameter_bytes = sum(_local_bytes(parameter) for parameter in trainer.model.parameters())
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    residual_bytes = trainer.sync.residual_bytes
    powersgd = getattr(trainer, "powersgd", None)
    if powersgd is not None:
        kept = (powersgd.error_dict, powersgd.p_memory_dict, powersgd.q_memory_dict)
        residual_bytes = sum(tensor.nbytes for tensors in kept for tensor in tensors.values())
    return {
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": parameter_bytes,
        "optimizer_bytes": sum(_local_bytes(value) for value in states if isinstance(value, Tensor)),
        "residual_bytes": residual_bytes,
        "replica_bytes": trainer.sync.replica_bytes,
    }


def _local_bytes(tensor: Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
