"""The kernels' operations as arms of a benchmark: what each does, how it is timed, and the bytes it cannot avoid.

Arms are timed in turn, round after round, so that a drift of the machine touches all alike. On a GPU an operation's
time is that between two events on a stream that was kept busy while the host enqueued it, with the L2 cache emptied
before; the host's own time for enqueuing is kept apart (``launch_ms``). A decoder gets what one peer sent.

``floor_bytes``: every argument read once and every result written once. Hash tables, which many buckets share, are
left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tagc.codec.bitmap import bitmap_bytes, or_bitmaps
from tagc.codec.delta import delta_bytes
from tagc.codec.hashing import build_hash_table, plan_layout
from tagc.codec.packed import plan_capacity
from tagc.codec.quantize import block_count, code_bytes
from tagc.codec.sparsify import threshold_exact

RANKS = 2
FULL_SIZE = 4_700_000  # values of a bucket over all shards: the MLP of one GPT-2 block
BLOCK = 256
SPIN_CYCLES = 10_000_000  # about 5 ms: longer than the host needs to enqueue any operation
L2_BYTES = 256 << 20  # more than the L2 cache of any GPU
WIRE = torch.bfloat16


@dataclass
class Arm:
    """One operation in one setting: ``prepare`` makes the arguments, ``run`` is timed."""

    op: str
    backend: str
    device: torch.device
    numel: int  # values it handles: the bucket's for an encoder, the shard's for a decoder
    density: float | None
    ratio: float | None
    floor_bytes: int
    prepare: Callable[[], tuple]
    run: Callable[..., object]
    samples_ms: list[float] = field(default_factory=list)
    launch_ms: list[float] = field(default_factory=list)  # on a GPU: until the host had enqueued it

    def measure(self) -> None:
        """Time one call on fresh arguments."""
        arguments = self.prepare()
        if self.device.type == "cuda":
            self._measure_on_gpu(arguments)
            return
        begin_s = time.perf_counter()
        self.run(*arguments)
        self.samples_ms.append((time.perf_counter() - begin_s) * 1e3)

    def _measure_on_gpu(self, arguments: tuple) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _flush_buffer(self.device).zero_()
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        begin_s = time.perf_counter()
        self.run(*arguments)
        self.launch_ms.append((time.perf_counter() - begin_s) * 1e3)
        end.record()
        end.synchronize()
        self.samples_ms.append(begin.elapsed_time(end))


@lru_cache
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(L2_BYTES, dtype=torch.uint8, device=device)


def make_arms(
    backends: Iterable[tuple[str, ModuleType]],
    device: torch.device,
    sizes: Sequence[int],
    densities: Sequence[float] = (0.2,),
    ratios: Sequence[float] = (2.0,),
) -> Iterator[Arm]:
    """Copies first, then every backend's operations. sizes: of buckets, rounded down to whole shards."""
    shards = [size // RANKS for size in sizes]
    for numel in sorted({*shards, *(RANKS * shard for shard in shards)}):
        source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)
        arguments = (target, source)
        yield Arm("copy", "torch", device, numel, None, None, 8 * numel, lambda a=arguments: a, Tensor.copy_)
    for backend, kernels in backends:
        for numel in sizes:
            bucket = _normal_bucket(numel, device)
            for density in densities:
                for ratio in ratios:
                    yield from sketch_arms(kernels, backend, bucket, density, ratio)
                yield from packed_arms(kernels, backend, bucket, density)
            yield from block_arms(kernels, backend, bucket)
            yield from delta_arms(kernels, backend, bucket)


def _normal_bucket(numel: int, device: torch.device) -> Tensor:
    return torch.randn(RANKS, numel // RANKS, generator=torch.Generator().manual_seed(0)).to(device)


def sketch_arms(kernels: Any, backend: str, gradient_WN: Tensor, density: float, ratio: float) -> Iterator[Arm]:
    """encode_sketch of a bucket; decode_sketch of what one peer sent."""
    device, numel, index_bytes = gradient_WN.device, gradient_WN.shape[1], bitmap_bytes(gradient_WN.shape[1])
    threshold = threshold_exact(gradient_WN, density)
    layout = plan_layout(numel, ratio)
    sizes = {"layout": layout, "table": build_hash_table(layout.rows, layout.cells, 0, device)}

    def encode(g: Tensor, carry: Tensor, owed: Tensor) -> Any:
        return kernels.encode_sketch(
            g, carry, owed, threshold, decay=1.0, rank=0, wire_dtype=WIRE, error_feedback=True, **sizes
        )

    def fresh() -> tuple:
        owed = torch.zeros(RANKS, index_bytes, dtype=torch.uint8, device=device)
        return gradient_WN.clone(), torch.zeros_like(gradient_WN), owed

    sent_bytes = RANKS * (index_bytes + layout.sketch_numel * WIRE.itemsize)
    floor = 3 * gradient_WN.nbytes + 2 * RANKS * index_bytes + sent_bytes + 4 * numel
    yield Arm("encode", backend, device, gradient_WN.numel(), density, ratio, floor, fresh, encode)
    sent = encode(*fresh())
    index, cells = or_bitmaps(sent.index_WB[1:]), sent.cells_WS[1].float()
    yield Arm(
        "decode",
        backend,
        device,
        numel,
        density,
        ratio,
        2 * index_bytes + cells.nbytes + 2 * 4 * numel,
        lambda: (index, cells.clone(), sent.own_N.clone()),
        lambda i, c, own: kernels.decode_sketch(i, c, own, estimate=False, **sizes),
    )


def packed_arms(kernels: Any, backend: str, gradient_WN: Tensor, density: float) -> Iterator[Arm]:
    """encode_packed of a bucket; decode_packed of one shard."""
    device, numel = gradient_WN.device, gradient_WN.shape[1]
    threshold = threshold_exact(gradient_WN, density)
    settings = {"capacity": plan_capacity(numel, density, 1.1), "wire_dtype": WIRE, "error_feedback": True}

    def encode(g: Tensor, residual: Tensor) -> Any:
        return kernels.encode_packed(g, residual, threshold, decay=1.0, rank=0, **settings)

    def fresh() -> tuple:
        return gradient_WN.clone(), torch.zeros_like(gradient_WN)

    sent_bytes = RANKS * (bitmap_bytes(numel) + settings["capacity"] * WIRE.itemsize)
    floor = 3 * gradient_WN.nbytes + sent_bytes + 4 * numel
    yield Arm("packed_encode", backend, device, gradient_WN.numel(), density, None, floor, fresh, encode)
    sent = encode(*fresh())
    yield Arm(
        "packed_decode",
        backend,
        device,
        numel,
        density,
        None,
        sent_bytes + 2 * 4 * numel,
        # What an owner receives: its own row empty, the peer's row full.
        lambda: (sent.index_WB, sent.values_WC, sent.own_N.clone()),
        kernels.decode_packed,
    )


def block_arms(kernels: Any, backend: str, gradient_WN: Tensor) -> Iterator[Arm]:
    """encode_blocks of a bucket and decode_blocks of one shard, 8 and 4 bits."""
    device, numel = gradient_WN.device, gradient_WN.shape[1]
    for bits in (8, 4):
        sizes = {"bits": bits, "block": BLOCK}

        def encode(g: Tensor, residual: Tensor, sizes: dict[str, int] = sizes) -> Any:
            return kernels.encode_blocks(g, residual, decay=1.0, rank=0, **sizes)

        def fresh() -> tuple:
            return gradient_WN.clone(), torch.zeros_like(gradient_WN)

        sent_bytes = RANKS * (code_bytes(numel, bits) + 4 * block_count(numel, BLOCK))
        floor = 3 * gradient_WN.nbytes + sent_bytes
        yield Arm(f"int{bits}_encode", backend, device, gradient_WN.numel(), None, None, floor, fresh, encode)
        sent = encode(*fresh())
        yield Arm(
            f"int{bits}_decode",
            backend,
            device,
            numel,
            None,
            None,
            sent_bytes + 2 * 4 * numel,
            lambda sent=sent: (sent.codes_WM, sent.scales_WK, sent.own_N.clone()),
            lambda codes, scales, own, sizes=sizes: kernels.decode_blocks(codes, scales, own, **sizes),
        )


def delta_arms(kernels: Any, backend: str, weights_WN: Tensor) -> Iterator[Arm]:
    """encode_delta of a whole bucket as one shard, and apply_delta of what one rank sent of its shard; 4 bits."""
    device, numel = weights_WN.device, weights_WN.shape[1]
    sizes = {"bits": 4, "block": BLOCK}
    target_N, replica_N = weights_WN.flatten(), torch.zeros_like(weights_WN).flatten()
    yield Arm(
        *("delta4_encode", backend, device, weights_WN.numel(), None, None),
        2 * weights_WN.nbytes + delta_bytes(weights_WN.numel(), **sizes),
        lambda: (target_N, replica_N),
        lambda target, replica: kernels.encode_delta(target, replica, **sizes),
    )
    codes_M, scales_K = kernels.encode_delta(weights_WN[0], replica_N[:numel], **sizes)
    yield Arm(
        *("delta4_decode", backend, device, numel, None, None, 2 * 4 * numel + delta_bytes(numel, **sizes)),
        lambda: (codes_M[None], scales_K[None], weights_WN[:1].clone()),
        lambda codes, scales, replica: kernels.apply_delta(codes, scales, replica, **sizes),
    )


def measure_rounds(arms: Sequence[Arm], rounds: Iterable[object], deadline_s: float | None = None) -> None:
    """One untimed call of each arm, which compiles and fills caches, then all arms in turn, round after round.

    deadline_s: on ``time.monotonic``'s clock; no round starts after it.
    """
    for arm in arms:
        arm.measure()
        arm.samples_ms.clear()
        arm.launch_ms.clear()
    for _ in rounds:
        if deadline_s is not None and time.monotonic() > deadline_s:
            return
        for arm in arms:
            arm.measure()


def summarise_arms(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """One row per arm.

    ``copy_ratio``: its speed over that of a copy of as many values on its device, in the same run. ``times_floor``: its
    time over that of its floor's bytes at the bandwidth of the largest copy.
    """
    copies = {(arm.device, arm.numel): arm for arm in arms if arm.op == "copy"}
    rows = []
    for arm in arms:
        p20, median, p80 = np.percentile(arm.samples_ms, (20, 50, 80))
        largest = max((copy for copy in copies.values() if copy.device == arm.device), key=lambda copy: copy.numel)
        floor_ms = arm.floor_bytes / largest.floor_bytes * float(np.median(largest.samples_ms))
        rows.append(
            {
                "op": arm.op,
                "backend": arm.backend,
                "device": arm.device.type,
                "numel": arm.numel,
                "density": arm.density,
                "ratio": arm.ratio,
                "ranks": RANKS,
                "n": len(arm.samples_ms),
                "median_ms": round(median, 4),
                "p20_ms": round(p20, 4),
                "p80_ms": round(p80, 4),
                "launch_ms": round(float(np.median(arm.launch_ms)), 4) if arm.launch_ms else None,
                "gb_per_s": round(arm.numel * 4 / median / 1e6, 3),
                "copy_ratio": round(float(np.median(copies[arm.device, arm.numel].samples_ms)) / median, 4),
                "floor_bytes": arm.floor_bytes,
                "times_floor": round(median / floor_ms, 3),
            }
        )
    return rows
