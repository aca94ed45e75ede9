"""The seam to FSDP2: its units, custom reduce-scatter and all-gather. No other file uses torch's private API.

FSDP2 hands a reduce-scatter an input of [W, sum of padded shards] that holds the unit's parameters in order, and only
those that received a gradient. Everything runs in the order of the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from tagc.comm.exchange import Exchange
from tagc.comm.stopwatch import Stopwatch
from tagc.errors import UserError

#: what a unit's reduce-scatter calls: gradient [W, S] fp32, output [S] fp32, divisor, group, may_wait
Reduce = Callable[[Tensor, Tensor, int, dist.ProcessGroup, bool], None]


@dataclass
class Unit:
    """One FSDP unit: what one call of ``fully_shard`` shards and reduces together."""

    name: str
    module: FSDPModule
    parameters: list[tuple[str, torch.Size]]  # (name, full shape) of those that train, in FSDP's order
    group: dist.ProcessGroup  # the ranks that the unit is sharded over
    device: torch.device
    casts_gradients: bool  # FSDP2 casts what was reduced to the parameters' dtype, as soon as the call returns
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)  # of all parameters, frozen ones included
    _before: dict[str, Any] = field(default_factory=dict)

    def holds_gradients(self) -> bool:
        """Whether a parameter has a sharded gradient already, to which FSDP2 adds what is reduced now."""
        return any(p.sharded_param.grad is not None for p in _param_groups(self.module)[0].fsdp_params)

    def may_fill_later(self) -> bool:
        """Whether FSDP2 only takes views of a reduction's output, so that a thread may fill it after the call."""
        if self.casts_gradients or self.holds_gradients():
            return False
        parameters = [p.sharded_param for p in _param_groups(self.module)[0].fsdp_params]
        return not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, frozen parameters and padding included: what a gather sends."""
        return sum(p.padded_sharded_param_size.numel() for p in _param_groups(self.module)[0].fsdp_params)

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype that FSDP2 gathers the unit in; uint8 for a unit that mixes dtypes."""
        group = _param_groups(self.module)[0]
        cast = group.mp_policy.param_dtype
        dtypes = {
            cast if cast and p.sharded_param.is_floating_point() else p.sharded_param.dtype for p in group.fsdp_params
        }
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    def split_shard(self, shard_N: Tensor) -> dict[str, DTensor]:
        """Copies of a shard's parts by the parameter's name, each placed like the parameter.

        shard_N: as many elements as :attr:`shard_numel`. Copies, because a DTensor of a part of a tensor that begins
        later in memory cannot be copied by torch.distributed.checkpoint.
        """
        fsdp_params = _param_groups(self.module)[0].fsdp_params
        sizes = [p.padded_sharded_param_size.numel() for p in fsdp_params]
        result = {}
        for fsdp_param, padded in zip(fsdp_params, shard_N.split(sizes), strict=True):
            parameter = fsdp_param.sharded_param
            local = padded[: parameter.to_local().numel()].view(parameter.to_local().shape).clone()
            result[self.names[parameter]] = fsdp_param.to_sharded_dtensor(local)
        return result

    def join_shard(self, parts: Mapping[str, DTensor], shard_N: Tensor) -> None:
        """Write what :meth:`split_shard` gave into a shard; padding becomes zero."""
        shard_N.zero_()
        fsdp_params = _param_groups(self.module)[0].fsdp_params
        sizes = [p.padded_sharded_param_size.numel() for p in fsdp_params]
        for fsdp_param, padded in zip(fsdp_params, shard_N.split(sizes), strict=True):
            local = parts[self.names[fsdp_param.sharded_param]].to_local()
            padded[: local.numel()].copy_(local.flatten())

    def attach_gather(self, all_gather: AllGather) -> None:
        """Route the unit's gathers through ``all_gather``."""
        group = _param_groups(self.module)[0]
        self._before.setdefault("_all_gather_comm", group._all_gather_comm)
        self.module.set_custom_all_gather(all_gather)

    def attach(self, reduce: Reduce) -> None:
        """Route the unit's reduce-scatters through ``reduce``."""
        group = _param_groups(self.module)[0]
        self._before |= {
            key: getattr(group, key)
            for key in ("_reduce_scatter_comm", "reduce_scatter_unused_params")
            if hasattr(group, key)
        }
        self.module.set_custom_reduce_scatter(GradientReduceScatter(self, reduce))
        if hasattr(self.module, "set_reduce_scatter_unused_params"):  # torch >= 2.13
            # Every reduction then holds every parameter of its unit, on all ranks and in every step.
            self.module.set_reduce_scatter_unused_params(True, recurse=False)

    def detach(self) -> None:
        """Give the unit back the collectives and settings that it had before :meth:`attach`."""
        group = _param_groups(self.module)[0]
        for key, value in self._before.items():
            setattr(group, key, value)
        self._before = {}


def find_group(model: nn.Module) -> tuple[dist.ProcessGroup, torch.device]:
    """The ranks that ``model`` is sharded over, and the device of its shards.

    Errors: ``UserError`` for a model that is not sharded, or whose units are sharded over different ranks.
    """
    if not isinstance(model, FSDPModule):
        raise UserError(
            f"the model ({type(model).__name__}) is no FSDP2 module: call fully_shard on its blocks and then on the "
            "model itself, before tagc.compress"
        )
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    found = [group for module in modules for group in _param_groups(module)]
    if not found:
        raise UserError("the model's FSDP2 units own no parameters: there is nothing to compress")
    groups: list[Any] = [getattr(group.mesh_info, "shard_process_group", None) for group in found]
    if None in groups:
        raise UserError("the model is replicated, not sharded; tagc.compress serves fully_shard over a 1-D mesh")
    if len({tuple(dist.get_process_group_ranks(group)) for group in groups}) > 1:
        raise UserError("units of one model are sharded over different ranks; shard all of them over one mesh")
    group: dist.ProcessGroup = groups[0]
    device: torch.device = found[0].device
    return group, device


def read_units(model: nn.Module, names: Mapping[FSDPModule, str] | None = None) -> list[Unit]:
    """The FSDP units below ``model`` that own parameters, in the order of ``model.named_modules()``.

    A unit is called like its module (``blocks.0``), the model itself ``root``, a unit of several modules like all of
    them (``norm+head``); ``names`` overrides that, by the unit's first module. Errors: ``UserError`` for a model that
    is not sharded, has run forward or is compressed already, and for units that a compressor cannot serve.
    """
    members: dict[Any, list[tuple[str, FSDPModule]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            members.setdefault(module._get_fsdp_state(), []).append((name, module))
    parameter_names = {parameter: name for name, parameter in model.named_parameters()}
    units = []
    for state, modules in members.items():
        first = modules[0][1]
        label = (names or {}).get(first) or "+".join(name or "root" for name, _ in modules)
        if _param_groups(first):
            units.append(_read_unit(label, first, parameter_names))
        if state._is_root is not None:
            raise UserError(
                "the model has already run forward, and FSDP2 is set up: call tagc.compress after fully_shard and "
                "before the first forward"
            )
    if not any(unit.parameters for unit in units):
        raise UserError("no parameter of the model requires a gradient: there is nothing to compress")
    return [unit for unit in units if unit.parameters or unit.group.size() > 1]


def after_backward(model: nn.Module, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` at the end of every backward of ``model``, after FSDP2's own end. Returns what undoes that.

    FSDP2 queues its end once per backward, in the outermost one where reentrant checkpointing nests them. What
    ``callback`` raises leaves ``backward()``.
    """
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}

    def wrap(end_backward: Callable[[], None]) -> Callable[[], None]:
        def end_both() -> None:
            end_backward()
            callback()

        return end_both

    for state in states:  # the state that backward reaches first queues its own
        state._root_post_backward_final_callback = wrap(state._root_post_backward_final_callback)  # type: ignore

    def undo() -> None:
        for state in states:
            del state._root_post_backward_final_callback  # the class's method again

    return undo


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch < 2.13


def _read_unit(label: str, module: FSDPModule, names: Mapping[nn.Parameter, str]) -> Unit:
    groups = _param_groups(module)
    if len(groups) > 1:
        raise UserError(
            f"unit {label} has {len(groups)} parameter groups (a shard_placement_fn with several meshes), and FSDP2 "
            "takes one custom reduce-scatter per unit; give each mesh a fully_shard call of its own"
        )
    (group,) = groups
    if isinstance(group._reduce_scatter_comm, GradientReduceScatter):
        raise UserError(f"unit {label} is compressed already: call remove() on what tagc.compress returned before")
    mesh = group.mesh_info
    if getattr(mesh, "replicate_mesh_dim", None) is not None:
        raise UserError(
            f"unit {label} is sharded over a mesh that also replicates (HSDP); the second hop is not compressed and "
            "its ranks would not learn of a NaN: shard over one mesh dimension"
        )
    parameters, dtypes = [], set()
    for fsdp_param in group.fsdp_params:
        info = fsdp_param._module_info
        parameter = getattr(info.module, info.param_name)
        if parameter.requires_grad:
            name = names[parameter]
            if fsdp_param.fsdp_placement != Shard(0):
                raise UserError(f"{name} is sharded as {fsdp_param.fsdp_placement}; only Shard(0) can be compressed")
            parameters.append((name, fsdp_param._orig_size))
            dtypes.add(parameter.dtype)
    if len(dtypes) > 1:
        raise UserError(
            f"unit {label} mixes parameters of {', '.join(sorted(map(str, dtypes)))}, which FSDP2 cannot reduce "
            "together; convert them to one dtype, or shard their modules apart"
        )
    own = next(iter(dtypes), torch.float32)
    policy = group.mp_policy
    reduced = policy.reduce_dtype or policy.param_dtype or own
    if reduced not in (torch.float32, torch.bfloat16):
        raise UserError(
            f"unit {label} reduces gradients in {reduced}; set MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    return Unit(label, module, parameters, mesh.shard_process_group, group.device, reduced != own, names)


class GradientReduceScatter(ReduceScatter):
    """Hands one unit's bucket to ``reduce`` and checks FSDP2's side of the contract."""

    def __init__(self, unit: Unit, reduce: Reduce) -> None:
        self._unit, self._reduce = unit, reduce

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer; the caching allocator recycles it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce input_tensor [W * N] into output_tensor [N], both float32 or both bfloat16; adds in float32.

        Errors: ``UserError`` for settings of FSDP2 that change what is reduced.
        """
        unit, ranks = self._unit, group.size()
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise UserError(f"unit {unit.name}: FSDP2 asks for {op}; do not set a gradient divide factor")
        shard_numel = sum(-(-shape[0] // ranks) * shape[1:].numel() for _, shape in unit.parameters)
        if input_tensor.numel() != ranks * shard_numel:
            raise UserError(
                f"unit {unit.name}: the bucket has {input_tensor.numel()} elements instead of {ranks * shard_numel}: "
                "requires_grad changed since tagc.compress, or some parameters received no gradient in this step and "
                "FSDP2 was told to leave them out (set_reduce_scatter_unused_params)"
            )
        # With SUM, FSDP2 divides the output itself as soon as this returns.
        may_wait = op == dist.ReduceOp.AVG and input_tensor.dtype == torch.float32 and unit.may_fill_later()
        divisor = ranks if op == dist.ReduceOp.AVG else 1
        if input_tensor.dtype == torch.float32:
            self._reduce(input_tensor.view(ranks, -1), output_tensor, divisor, group, may_wait)
            return
        output = torch.empty_like(output_tensor, dtype=torch.float32)
        self._reduce(input_tensor.float().view(ranks, -1), output, divisor, group, may_wait)
        output_tensor.copy_(output)


class ParameterAllGather(AllGather):
    """Sends parameter shards through the exchange, in the dtype FSDP2 gathers them in (fp32 or bf16)."""

    def __init__(self, exchange: Exchange, stopwatch: Stopwatch) -> None:
        self._exchange, self._stopwatch = exchange, stopwatch

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer; the caching allocator recycles it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        with self._stopwatch.span("exposed"), self._stopwatch.span("gather"):
            self._exchange.all_gather(output_tensor, input_tensor, group, "param")
