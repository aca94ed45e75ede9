"""The seam to FSDP2: custom reduce-scatter and all-gather objects. The only file that imports torch's private API.

FSDP2 hands a reduce-scatter an input of [W, sum of padded shards] that holds the unit's parameters in order, and only
those that received a gradient. Everything runs in the order of the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from tagc.comm.exchange import Exchange
from tagc.comm.stopwatch import Stopwatch


class GradientReduceScatter(ReduceScatter):
    """Hands one unit's bucket to ``reduce`` and checks FSDP2's side of the contract."""

    def __init__(
        self, unit: str, shard_numel: int, reduce: Callable[[Tensor, Tensor, int, dist.ProcessGroup], None]
    ) -> None:
        self._unit, self._shard_numel, self._reduce = unit, shard_numel, reduce

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
        """Reduce input_tensor [W * N] into output_tensor [N]. Errors: ``RuntimeError`` for anything not foreseen."""
        ranks = group.size()
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(f"unit {self._unit}: FSDP asks for {op}; do not set a gradient divide factor")
        if input_tensor.dtype != torch.float32:
            raise RuntimeError(f"unit {self._unit}: gradients arrive as {input_tensor.dtype}; set reduce_dtype=float32")
        if input_tensor.numel() != ranks * self._shard_numel:
            raise RuntimeError(
                f"unit {self._unit}: the bucket has {input_tensor.numel()} elements instead of "
                f"{ranks * self._shard_numel}: some of its parameters received no gradient in this step. Freeze them "
                "before sharding, or call set_reduce_scatter_unused_params(True)"
            )
        self._reduce(input_tensor.view(ranks, -1), output_tensor, ranks if op == dist.ReduceOp.AVG else 1, group)


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


def attach(unit: FSDPModule, reduce_scatter: GradientReduceScatter, all_gather: ParameterAllGather) -> None:
    """Route one FSDP unit's collectives through the given objects (not recursive: call it for every unit)."""
    unit.set_custom_reduce_scatter(reduce_scatter)
    unit.set_custom_all_gather(all_gather)
