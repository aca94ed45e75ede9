"""Part 2: no compressor's encode or decode waits for the GPU.

On CUDA PyTorch itself raises at a wait. On a CPU, where nothing can be waited for, the operations that would have to
fetch a value are forbidden instead.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.gpu_check.rows import Part, load_kernels, load_option, run_part
from tagc.codec.bitmap import or_bitmaps
from tagc.compressors import COMPRESSORS, BucketSpec, Compressor
from tagc.compressors import Part as Message
from tagc.compressors.tagc import HASH_SEEDS
from tagc.config import CompressorConfig
from tagc.host.pipe import closed_pipe_ends_quietly

RANKS = 2
WARM_UP = HASH_SEEDS + 1  # every hash table is built, which copies it; kernels compile, which may wait
STEPS = HASH_SEEDS
FETCHING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._unique2.default,
}


class ForbidFetching(TorchDispatchMode):
    """Raises at operations that need a value, or a shape that depends on one, on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func in FETCHING or by_mask:
            raise RuntimeError(f"{func} would wait for the GPU")
        return func(*args, **(kwargs or {}))


@contextmanager
def forbid_waits(device: torch.device) -> Iterator[None]:
    """Inside, whatever waits for the device raises ``RuntimeError``."""
    if device.type != "cuda":
        with ForbidFetching():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def receive(message: Message, rank: int) -> torch.Tensor:
    """What arrives if the peer sends what this rank sends to it."""
    rows = message.tensor
    if message.reduce == "stack":
        return rows
    return or_bitmaps(rows) if message.reduce == "or" else rows.float().sum(dim=0)


def make_compressor(name: str, numel: int, device: torch.device) -> Compressor:
    """As configured in conf/, for a bucket of one parameter."""
    config = CompressorConfig(**load_option("compressor", name))
    spec = BucketSpec("unit", (("weight", numel),), RANKS, 0, device, seed=0)
    return COMPRESSORS[name](config, spec, load_kernels())


def run_step(compressor: Compressor, gradient_WN: torch.Tensor, step: int) -> torch.Tensor:
    """Encode, pretend to exchange, decode."""
    payload = compressor.encode(gradient_WN, step)
    return compressor.decode([receive(message, 0) for message in payload.parts], payload)


def check_compressor(name: str, numel: int, device: torch.device, warm_up: int, steps: int) -> None:
    """Errors: ``RuntimeError`` at the first wait after the warm-up."""
    compressor = make_compressor(name, numel, device)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(RANKS, numel, generator=generator)
    # Three tenths non-zero: lhc, which sends them all, can peel its sketch.
    gradient = torch.where(torch.rand(RANKS, numel, generator=generator) < 0.3, dense, 0.0).to(device)
    fresh = [gradient.clone() for _ in range(warm_up + steps)]
    for step in range(warm_up):
        run_step(compressor, fresh[step], step)
    is_meant = not compressor.follows_layer_policy  # a dense method
    assert is_meant or not compressor.is_dense(warm_up), "a dense step would test nothing"
    with forbid_waits(device):
        for step in range(warm_up, warm_up + steps):
            total_N = run_step(compressor, fresh[step], step)
    assert total_N.isfinite().all()


def measure(part: Part) -> bool:
    """One row per compressor: steps without a wait, or 0."""
    numel, warm_up, steps = (2000, 2, 1) if part.is_cpu else (1_000_003, WARM_UP, STEPS)
    passed = True
    for name in COMPRESSORS:
        try:
            check_compressor(name, numel, part.device, warm_up, steps)
        except Exception:  # the other compressors are checked all the same
            sys.stderr.write(f"{name}:\n{traceback.format_exc()}\n")
            passed = False
            part.add_row(name, {"numel": numel, "ranks": RANKS}, "steps_without_wait", "steps", 0)
        else:
            part.add_row(name, {"numel": numel, "ranks": RANKS}, "steps_without_wait", "steps", steps)
    return passed


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        run_part("syncs", measure)
