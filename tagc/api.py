"""The front door: gradient compression for any FSDP2 model, with the training loop left as it is.

for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
compression = tagc.compress(model, optimizer, gradients="tagc2", sparsity=0.8)
...                              # forward, backward, clip, optimizer.step(), zero_grad()
print(compression.report())
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule

from tagc.comm.buckets import describe_policy
from tagc.comm.exchange import Exchange
from tagc.comm.fsdp2 import Unit, after_backward, find_group, read_units
from tagc.comm.gradient_sync import GradientSync, SyncSettings
from tagc.comm.layer_report import LayerReport, list_layers
from tagc.comm.policy import format_policy
from tagc.comm.step_close import StepReport
from tagc.comm.stopwatch import Stopwatch
from tagc.compressors import COMPRESSORS, Compressor, Kind
from tagc.config import WEIGHTS, CompressorConfig, Config, WeightsConfig, keys_used_by, uses, validate
from tagc.errors import UserError
from tagc.kernels import resolve_backend
from tagc.network.link import Link

logger = logging.getLogger("tagc")
KINDS: tuple[Kind, ...] = ("value", "index", "return", "param")


@dataclass(frozen=True)
class Laboratory:
    """What an experiment adds to :func:`compress`: its own link and clock, names, and diagnostics."""

    exchange: Exchange
    stopwatch: Stopwatch
    unit_names: Mapping[FSDPModule, str] = field(default_factory=dict)
    fidelity_every: int = 0  # as logging.fidelity_every
    layers_every: int = 0  # as logging.histograms_every


def compress(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    gradients: str | type[Compressor] | CompressorConfig,
    weights: str | WeightsConfig = "full",
    kernels: str | ModuleType = "auto",
    seed: int = 0,
    overlap: bool = True,
    timeout_s: float | None = None,
    laboratory: Laboratory | None = None,
    **options: Any,
) -> Compression:
    """Compress the gradients that FSDP2 reduces, from now on. To be called on all ranks of the model's mesh.

    Call it after ``fully_shard`` and before the first forward. The loop stays as it is: gradients are complete, and
    checked for NaN and Inf on all ranks, when ``backward()`` returns, and ``optimizer``'s step marks the end of a
    step. Accumulate with ``model.set_requires_gradient_sync(False)`` on all micro-batches but the last. A parameter
    without a gradient in a step counts as one whose gradient is zero (``set_reduce_scatter_unused_params``).

    gradients: a method's name (``tagc.config.COMPRESSORS``), a :class:`Compressor` class of one's own, or a
    :class:`CompressorConfig`. weights: how parameters travel, a name (``tagc.config.WEIGHTS``) or a
    :class:`WeightsConfig`; "delta4" sends 4-bit differences to a replica once per optimizer step. kernels: a backend's
    name, or its module. seed: of hashes and sampled positions. overlap: on the CPU, exchange in a thread while backward
    goes on. timeout_s: of that thread's collectives; None is torch's default. options: the keys of
    :class:`CompressorConfig`.

    Memory per rank: an error-feedback method keeps one residual of the size of the full, unsharded gradient of what
    it compresses (:attr:`Compression.residual_bytes`), in ``residual_dtype``. From encode to the
    end of backward a copy, to take a failed step back, doubles that. ``fsdp``, ``bf16`` and ``noop`` keep nothing.
    Weights as differences need a replica of all weights on every rank (:attr:`Compression.replica_bytes`).

    Errors: :class:`UserError` (a ``ValueError``) naming the argument, its value and the remedy. An error on one rank
    is an error on all ranks of the mesh, and so are settings that differ between ranks.
    """
    group, device = find_group(model)
    settings, backend, units, problem = SyncSettings(CompressorConfig()), None, [], None
    note: str | None = None
    try:
        settings = _build_settings(gradients, weights, seed, overlap, timeout_s, options, laboratory)
        backend = kernels if isinstance(kernels, ModuleType) else resolve_backend(kernels, device.type)[1]
        units = read_units(model, laboratory.unit_names if laboratory else None)
        note = _check_optimizer(optimizer, model)
    except UserError as error:
        problem = error
    _agree(settings, units, problem, group, device)
    assert backend is not None
    lab = laboratory or Laboratory(Exchange(Link(), device), Stopwatch(device))
    try:
        sync = GradientSync(units, settings, lab.exchange, lab.stopwatch, backend, group, device)
    except UserError as error:  # the same on all ranks
        raise error if laboratory else UserError(_name_arguments(str(error))) from None
    return Compression(model, optimizer, sync, quiet=laboratory is not None, notes=[note] if note else [])


class Compression(Stateful):
    """What :func:`compress` returns: the compression of one model, until :meth:`remove`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync: GradientSync,
        quiet: bool = False,
        notes: Sequence[str] = (),
    ) -> None:
        """Attach ``sync`` to the model and the optimizer. quiet: log nothing, and leave the errors' Hydra keys.

        notes: what the log and the report say about the call.
        """
        self.sync, self._quiet, self._notes = sync, quiet, list(notes)
        self._report: StepReport | None = None
        self._before: Counter[Kind] = Counter()
        self._sent: Counter[Kind] = Counter()
        sync.attach()
        self._undo_backward = after_backward(model, self._end_backward)
        self._hook = optimizer.register_step_post_hook(lambda *_: self._end_step())
        self._load_hook = model.register_load_state_dict_post_hook(lambda *_: sync.weights.note_load())
        if not quiet and dist.get_rank() == 0 and sync.buckets:
            for line in format_policy(describe_policy(sync.buckets)):
                logger.info("%s", line)
            for line in [*sync.explain_dense(), *self._notes]:
                logger.warning("%s", _name_arguments(line))

    def _end_backward(self) -> None:
        try:
            self.sync.end_backward()
        except UserError as error:
            raise error if self._quiet else UserError(_name_arguments(str(error))) from None
        report = self.sync.last_report
        if report is None or report is self._report:
            return
        self._report = report
        for message in report.messages if not self._quiet and dist.get_rank() == 0 else ():
            logger.warning("step %d: %s", self.sync.step + 1, _name_arguments(message))

    def _end_step(self) -> None:
        total = self.sync.exchange.total_bytes
        self._sent, self._before = total - self._before, Counter(total)
        self.sync.begin_step(self.sync.step + 1)

    @property
    def step(self) -> int:
        """Finished optimizer steps; a loaded state sets it."""
        return self.sync.step

    @property
    def residual_bytes(self) -> int:
        """Memory that the residuals take on this rank."""
        return self.sync.residual_bytes

    @property
    def replica_bytes(self) -> int:
        """Memory that the replicas of the weights take on this rank."""
        return self.sync.replica_bytes

    def metrics(self) -> dict[str, float | int | str | None]:
        """The newest finished optimizer step's numbers: bytes this rank sent by kind, and means over all ranks.

        ``value_wire_bytes``, ``index_wire_bytes``, ``return_wire_bytes`` (gradients, together ``grad_wire_bytes``),
        ``param_wire_bytes`` (gathers, validation between the steps included), ``compressed_buckets``,
        ``dense_buckets``, ``achieved_sparsity``, ``union_density``, ``peeled_frac``, ``residual_norm``; None where
        nothing was measured. Before the first step: zeros.
        """
        row: dict[str, float | int | str | None] = {"step": self.step}
        row |= {f"{kind}_wire_bytes": self._sent.get(kind, 0) for kind in KINDS}
        row["grad_wire_bytes"] = sum(self._sent.get(kind, 0) for kind in KINDS if kind != "param")
        return row | (self._report.metrics if self._report else {})

    def report(self) -> LayerReport:
        """What every layer does: its method or why it is dense, bytes expected and measured, sparsity, peeled.

        ``print`` it for a table, or take its ``rows``.
        """
        layers = list_layers(self.sync, self._report)
        for row in layers.rows:
            row["why_dense"] = row["why_dense"] and _name_arguments(row["why_dense"])
        layers.notes += self._notes
        return layers

    def refresh(self) -> None:
        """Send the weights themselves at the next gathers: after a change outside the optimizer, on every rank.

        ``model.load_state_dict`` does this by itself. Where no replica is kept there is nothing to do.
        """
        self.sync.weights.refresh()

    def remove(self) -> None:
        """Give the model and the optimizer back as plain FSDP2. What the residuals hold back is dropped."""
        self._hook.remove()
        self._load_hook.remove()
        self._undo_backward()
        self.sync.detach()

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, for torch.distributed.checkpoint; nothing is copied.

        Residuals differ between ranks, and a distributed checkpoint keeps one writer per key, so every rank's keys
        begin with its number.
        """
        state = self.rank_state()
        state["step"], state["ranks"] = torch.tensor(self.step), torch.tensor(dist.get_world_size())
        if self.sync.weights.kept:
            state["replica"], state["replica_steps"] = self.sync.weights.state_dict(), self.sync.weights.sent_steps()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, bitwise, from what :meth:`state_dict` gave on as many ranks.

        Errors: ``UserError`` if it comes from another number of ranks or another method.
        """
        saved, ranks = int(state["ranks"]), dist.get_world_size()
        if saved != ranks:
            raise UserError(f"the compression's state is one of {saved} ranks, and here are {ranks}; start without it")
        missing = self.rank_state().keys() - state.keys()
        if missing:
            raise UserError(
                f"the compression's state lacks {min(missing)}: it was saved with another method or other units"
            )
        self.load_rank_state(state)
        self.sync.begin_step(int(state["step"]))
        weights = self.sync.weights
        if weights.kept and "replica_steps" in state:
            weights.restore(state["replica"], state["replica_steps"])
        elif weights.kept:
            logger.warning("the state holds no replica of the weights: the next gathers send the weights themselves")

    def rank_state(self) -> dict[str, Any]:
        """The compressors' tensors of this rank: ``rank_<r>/<slot>/<name>``."""
        return {f"rank_{dist.get_rank()}/{key}": value for key, value in self.sync.compressor_state().items()}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`rank_state` gave on this rank; other keys are ignored."""
        prefix = f"rank_{dist.get_rank()}/"
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        self.sync.load_compressor_state(own)


# --- checks ---------------------------------------------------------------------------------------------------------


def _name_arguments(message: str) -> str:
    """Name the arguments of :func:`compress` in a message that names Hydra keys."""
    return re.sub(r"\b(compressor|trainer)\.(?=[a-z])", "", message).replace("name=", "gradients=")


def _build_settings(
    gradients: str | type[Compressor] | CompressorConfig,
    weights: str | WeightsConfig,
    seed: int,
    overlap: bool,
    timeout_s: float | None,
    options: dict[str, Any],
    laboratory: Laboratory | None,
) -> SyncSettings:
    """Check the arguments as the command line checks its keys. Errors: ``UserError`` naming the argument."""
    if isinstance(weights, str):
        if weights not in WEIGHTS:
            raise UserError(f"weights={weights!r} is out of range; legal: {', '.join(WEIGHTS)}")
        weights = WeightsConfig(name=weights)
    config, method = CompressorConfig(), None
    if isinstance(gradients, CompressorConfig):
        config = gradients
    elif isinstance(gradients, str):
        if gradients not in COMPRESSORS:
            raise UserError(
                f"gradients={gradients!r} is out of range; legal: {', '.join(COMPRESSORS)}, or a Compressor class"
            )
        config = CompressorConfig(name=gradients)
    elif isinstance(gradients, type) and issubclass(gradients, Compressor):
        method = gradients
    else:
        raise UserError(f"gradients={gradients!r} is neither a method's name nor a subclass of Compressor")
    config = _with_options(config, options, method)
    try:
        validate(Config(compressor=config, weights=weights, seed=seed))
    except UserError as error:
        raise error if laboratory else UserError(_name_arguments(str(error))) from None
    lab_keys = (
        {"fidelity_every": laboratory.fidelity_every, "layers_every": laboratory.layers_every}
        if laboratory
        else {"layers_every": 1}
    )
    return SyncSettings(config, method, seed, overlap, timeout_s, weights=weights, **lab_keys)


def _with_options(
    config: CompressorConfig, options: dict[str, Any], own_method: type[Compressor] | None
) -> CompressorConfig:
    legal = {item.name for item in fields(CompressorConfig)} - {"name"}
    for name, value in options.items():
        if name not in legal:
            raise UserError(f"{name}={value!r} is no option of a compressor; legal: {', '.join(sorted(legal))}")
        if own_method is None and not uses(config.name, f"compressor.{name}"):
            used = ", ".join(keys_used_by(config.name, "compressor"))
            raise UserError(f"{name}={value!r} is no option of gradients={config.name!r}; it takes: {used or 'none'}")
        expected = type(getattr(config, name))
        is_number = expected is float and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not expected and not is_number:
            raise UserError(f"{name}={value!r} must be of type {expected.__name__}, not {type(value).__name__}")
    return replace(config, **options)


def _check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
    """What to tell a user whose optimizer updates only a part of what trains; several optimizers are legal.

    Errors: ``UserError`` if it updates none of the model's parameters.
    """
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not any(parameter in updated for parameter in model.parameters()):
        raise UserError(
            f"the optimizer ({type(optimizer).__name__}) updates none of the model's parameters: fully_shard replaces "
            "them, so build the optimizer after it"
        )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    left = [name for name, p in model.named_parameters() if p.requires_grad and p not in updated]
    if not left:
        return None
    shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
    return (
        f"the optimizer ({type(optimizer).__name__}) updates {len(trained) - len(left)} of the {len(trained)} "
        f"parameters that train, not {shown}. A step ends with its step(): step what updates the rest before the next "
        "forward, too, or freeze it before tagc.compress"
    )


def _agree(
    settings: SyncSettings,
    units: list[Unit],
    problem: UserError | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Raise on all ranks what one rank found, and what they were told differently: one all-gather of a few numbers."""
    told = {item.name: getattr(settings.compressor, item.name) for item in fields(CompressorConfig)}
    told["gradients"] = told.pop("name") if settings.method is None else settings.method.__qualname__
    told |= {item.name: getattr(settings, item.name) for item in fields(SyncSettings)[2:]}
    told["model (its units, parameters or requires_grad)"] = [(unit.name, unit.parameters) for unit in units]
    hashes = [crc32(repr(value).encode()) for value in told.values()]
    own = torch.tensor([problem is not None, *hashes], dtype=torch.int64, device=device)
    gathered_RN = Exchange(Link(), device).gather_numbers(own, group).cpu()
    if problem is not None:
        raise problem
    failed = gathered_RN[:, 0].nonzero().flatten().tolist()
    if failed:
        raise UserError(f"tagc.compress failed on rank {', '.join(map(str, failed))}; see that rank's message")
    for (name, value), hashes_R in zip(told.items(), gathered_RN[:, 1:].T, strict=True):
        other = (hashes_R != hashes_R[group.rank()]).nonzero().flatten().tolist()
        if other:
            shown = "" if " " in name else f"={value!r}"
            raise UserError(
                f"the ranks disagree about {name}: here{shown}, something else on rank {', '.join(map(str, other))}; "
                "call tagc.compress alike on every rank"
            )
