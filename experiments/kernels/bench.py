"""How fast the kernels are, against a copy of the same bytes on the same core.

    python -m experiments.kernels.bench [--quick] [--out rows.csv]

Every operation of every backend that runs on this machine's CPU, at several sizes, densities and ratios, and a plain
copy, are timed in turn, round after round, so that a drift of the machine touches all arms alike. One thread. Rows are
long format: one per arm, with median, 20th and 80th percentile. The last line is JSON: each operation's speed over the
copy's for the fastest CPU backend at 4.7 M values, sparsity 0.8, 2 ranks, ratio 2 (decode: what the peer sent).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from tagc.codec.bitmap import or_bitmaps
from tagc.codec.hashing import build_hash_table, plan_layout
from tagc.codec.packed import plan_capacity
from tagc.codec.sparsify import threshold_exact
from tagc.kernels import BACKENDS, resolve_backend
from tagc.record.manifest import describe_git, describe_hardware, describe_versions

RANKS = 2
FULL_SIZE = 4_700_000  # values of a bucket over all shards
SIZES = (147_456, 1_000_003, FULL_SIZE)
QUICK_SIZES = (FULL_SIZE,)
DENSITIES = (0.05, 0.2)
RATIOS = (2.0, 3.0)
HEADLINE = {"density": 0.2, "ratio": 2.0}
JSON_KEYS = ("encode", "decode", "packed_encode", "packed_decode", "int8_encode")
CPU = torch.device("cpu")


@dataclass
class Arm:
    """One operation in one setting: ``prepare`` makes the arguments, ``run`` is timed."""

    op: str
    backend: str
    numel: int  # values it handles: the bucket's for an encoder, the shard's for a decoder
    density: float | None
    ratio: float | None
    prepare: Callable[[], tuple]
    run: Callable[..., object]
    samples_ms: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Time one call on fresh arguments."""
        arguments = self.prepare()
        begin_s = time.perf_counter()
        self.run(*arguments)
        self.samples_ms.append((time.perf_counter() - begin_s) * 1e3)


def make_arms(sizes: tuple[int, ...], quick: bool) -> Iterator[Arm]:
    """Copies first, then every backend's operations."""
    for numel in sorted({*sizes, *(size // RANKS for size in sizes)}):
        source, target = torch.randn(numel), torch.empty(numel)
        yield Arm("copy", "torch", numel, None, None, lambda s=source, t=target: (t, s), torch.Tensor.copy_)
    for backend in [name for name in BACKENDS if "cpu" in BACKENDS[name].devices]:
        kernels = resolve_backend(backend)[1]
        for numel in sizes:
            for density in DENSITIES[-1:] if quick else DENSITIES:
                for ratio in RATIOS[:1] if quick else RATIOS:
                    yield from sketch_arms(kernels, backend, numel, density, ratio)
                yield from packed_arms(kernels, backend, numel, density)
            yield from block_arms(kernels, backend, numel)


def _normal_bucket(numel: int) -> torch.Tensor:
    return torch.randn(RANKS, numel // RANKS, generator=torch.Generator().manual_seed(0))


def sketch_arms(kernels, backend: str, numel: int, density: float, ratio: float) -> Iterator[Arm]:
    """encode_sketch of a bucket; decode_sketch of what one peer sent."""
    gradient = _normal_bucket(numel)
    threshold = threshold_exact(gradient, density)
    layout = plan_layout(numel // RANKS, ratio)
    table = build_hash_table(layout.rows, layout.cells, 0, CPU)
    settings = {"decay": 1.0, "rank": 0, "layout": layout, "table": table, "error_feedback": True}

    def encode(g, carry, owed):
        return kernels.encode_sketch(g, carry, owed, threshold, wire_dtype=torch.bfloat16, **settings)

    def fresh():
        return gradient.clone(), torch.zeros_like(gradient), torch.zeros(RANKS, -(-gradient.shape[1] // 8)).byte()

    yield Arm("encode", backend, numel, density, ratio, fresh, encode)
    sent = encode(*fresh())
    index, cells = or_bitmaps(sent.index_WB[1:]), sent.cells_WS[1].float()
    yield Arm(
        "decode",
        backend,
        numel // RANKS,
        density,
        ratio,
        lambda: (index, cells.clone(), sent.own_N.clone()),
        lambda i, c, own: kernels.decode_sketch(i, c, own, layout=layout, table=table, estimate=False),
    )


def packed_arms(kernels, backend: str, numel: int, density: float) -> Iterator[Arm]:
    """encode_packed of a bucket; decode_packed of one shard."""
    gradient = _normal_bucket(numel)
    threshold = threshold_exact(gradient, density)
    capacity = plan_capacity(numel // RANKS, density, 1.1)

    def encode(g, residual):
        return kernels.encode_packed(
            g, residual, threshold, decay=1.0, rank=0, capacity=capacity, wire_dtype=torch.bfloat16, error_feedback=True
        )

    def fresh():
        return gradient.clone(), torch.zeros_like(gradient)

    yield Arm("packed_encode", backend, numel, density, None, fresh, encode)
    sent = encode(*fresh())
    # What an owner receives: its own row empty, the peer's row full.
    yield Arm(
        "packed_decode",
        backend,
        numel // RANKS,
        density,
        None,
        lambda: (sent.index_WB, sent.values_WC, sent.own_N.clone()),
        kernels.decode_packed,
    )


def block_arms(kernels, backend: str, numel: int) -> Iterator[Arm]:
    """encode_blocks of a bucket and decode_blocks of one shard, 8 and 4 bits."""
    gradient = _normal_bucket(numel)
    for bits in (8, 4):

        def encode(g, residual, bits=bits):
            return kernels.encode_blocks(g, residual, decay=1.0, rank=0, bits=bits, block=256)

        yield Arm(f"int{bits}_encode", backend, numel, None, None, lambda: (gradient.clone(), gradient * 0), encode)
        sent = encode(gradient.clone(), gradient * 0)
        yield Arm(
            f"int{bits}_decode",
            backend,
            numel // RANKS,
            None,
            None,
            lambda sent=sent: (sent.codes_WM, sent.scales_WK, sent.own_N.clone()),
            lambda codes, scales, own, bits=bits: kernels.decode_blocks(codes, scales, own, bits=bits, block=256),
        )


def summarise(arms: list[Arm]) -> list[dict[str, object]]:
    """One row per arm; ``copy_ratio`` is its speed over the copy of as many bytes in the same run."""
    copy_ms = {arm.numel: float(np.median(arm.samples_ms)) for arm in arms if arm.op == "copy"}
    git, versions, hardware = describe_git(), describe_versions(), describe_hardware()
    rows = []
    for arm in arms:
        p20, median, p80 = np.percentile(arm.samples_ms, (20, 50, 80))
        rows.append(
            {
                "op": arm.op,
                "backend": arm.backend,
                "numel": arm.numel,
                "density": arm.density,
                "ratio": arm.ratio,
                "ranks": RANKS,
                "n": len(arm.samples_ms),
                "median_ms": round(median, 4),
                "p20_ms": round(p20, 4),
                "p80_ms": round(p80, 4),
                "gb_per_s": round(arm.numel * 4 / median / 1e6, 3),
                "copy_ratio": round(copy_ms[arm.numel] / median, 4),
                "commit": git["git_commit"],
                "dirty": git["git_dirty"],
                "torch": versions["torch"],
                "numba": versions["numba"],
                "cpu": hardware["cpu_model"],
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def headline(rows: list[dict[str, object]]) -> dict[str, object]:
    """The fastest CPU backend's ratio to the copy, by operation, in the headline setting."""

    def matches(row: dict[str, object], op: str) -> bool:
        numel = FULL_SIZE if op.endswith("encode") else FULL_SIZE // RANKS
        is_setting = row["density"] in (None, HEADLINE["density"]) and row["ratio"] in (None, HEADLINE["ratio"])
        return row["op"] == op and row["numel"] == numel and is_setting

    return {op: max(row["copy_ratio"] for row in rows if matches(row, op)) for op in JSON_KEYS}


def main() -> None:
    """Measure, write the rows, print the headline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the headline setting alone, in under a minute")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench.csv"), help="where the rows go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms = list(make_arms(QUICK_SIZES if options.quick else SIZES, options.quick))
    for arm in arms:
        arm.measure()  # compiles, and fills caches
        arm.samples_ms.clear()
    for _ in track(range(11 if options.quick else 21), description="rounds", disable=not sys.stderr.isatty()):
        for arm in arms:
            arm.measure()
    rows = summarise(arms)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    sys.stdout.write(f"{len(rows)} rows in {options.out}\n{json.dumps(headline(rows))}\n")


if __name__ == "__main__":
    main()
