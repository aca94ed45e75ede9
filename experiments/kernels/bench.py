"""How fast the kernels are, against a copy of the same bytes on the same device.

    python -m experiments.kernels.bench [--quick] [--out rows.csv]

Every operation of every backend that runs on this machine's CPU, and of the Triton backend where there is a GPU, at
several sizes, densities and ratios, and a plain copy (see experiments/kernels/arms.py). One CPU thread. Rows are long
format: one per arm, with median, 20th and 80th percentile. The last line is JSON: each operation's speed over the
copy's for the fastest CPU backend at 4.7 M values, sparsity 0.8, 2 ranks, ratio 2 (decode: what the peer sent).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track

from experiments.kernels.arms import FULL_SIZE, RANKS, Arm, make_arms, measure_rounds, summarise_arms
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.kernels import BACKENDS, resolve_backend
from tagc.record.manifest import describe_git, describe_hardware, describe_versions

SIZES = (147_456, 1_000_003, FULL_SIZE)
QUICK_SIZES = (FULL_SIZE,)
DENSITIES = (0.05, 0.2)
RATIOS = (2.0, 3.0)
HEADLINE = {"density": 0.2, "ratio": 2.0}
JSON_KEYS = ("encode", "decode", "packed_encode", "packed_decode", "int8_encode", "delta4_encode", "delta4_decode")


def list_arms(quick: bool) -> Iterator[Arm]:
    """All CPU backends on the CPU; on a GPU its own kernels (the reference would wait for it at every round)."""
    settings = (QUICK_SIZES, (0.2,), (2.0,)) if quick else (SIZES, DENSITIES, RATIOS)
    on_cpu = [name for name, backend in BACKENDS.items() if "cpu" in backend.devices]
    yield from make_arms([resolve_backend(name) for name in on_cpu], torch.device("cpu"), *settings)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        yield from make_arms([resolve_backend("triton", "cuda")], device, *settings)


def describe_machine() -> dict[str, object]:
    """The columns that say where a row comes from."""
    git, versions, hardware = describe_git(), describe_versions(), describe_hardware()
    return {
        "commit": git["git_commit"],
        "dirty": git["git_dirty"],
        **{name: versions[name] for name in ("torch", "numba", "triton")},
        "cpu": hardware["cpu_model"],
        "gpu": hardware["gpus"][0] if hardware["gpus"] else None,
        "threads": torch.get_num_threads(),
    }


def headline(rows: list[dict[str, object]]) -> dict[str, object]:
    """The fastest CPU backend's ratio to the copy, by operation, in the headline setting."""

    def matches(row: dict[str, object], op: str) -> bool:
        numel = FULL_SIZE if op.endswith("encode") else FULL_SIZE // RANKS
        is_setting = row["density"] in (None, HEADLINE["density"]) and row["ratio"] in (None, HEADLINE["ratio"])
        return row["op"] == op and row["device"] == "cpu" and row["numel"] == numel and is_setting

    return {op: max(row["copy_ratio"] for row in rows if matches(row, op)) for op in JSON_KEYS}


def main() -> None:
    """Measure, write the rows, print the headline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the headline setting alone, in under a minute")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench.csv"), help="where the rows go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms = list(list_arms(options.quick))
    rounds = range(11 if options.quick else 21)
    measure_rounds(arms, track(rounds, description="rounds", disable=not sys.stderr.isatty()))
    machine = describe_machine()
    rows = [row | machine for row in summarise_arms(arms)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    sys.stdout.write(f"{len(rows)} rows in {options.out}\n{json.dumps(headline(rows))}\n")


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
