"""Short real runs that the cost model is fitted to and judged by.

    python -m experiments.cost_model.measure [--repeat] [--steps 9]

One run of nano after another, each through run.py, its summary appended to measured.csv. A run that is there already
is skipped, so an interrupted call goes on where it stopped (``--repeat`` measures all again). ``load`` is the machine's
load average at the end of the run: above the number of cores something else was running, and the row is provisional.
``wire_bytes_per_byte`` is what the paced link charged for headers: 1 in rows older than that.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.rows import append_row, make_parser
from tagc.host.device import count_cores
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.network.link import WIRE_BYTES_PER_BYTE
from tagc.record import load_summary

ROOT = Path(__file__).parents[2]
MEASURED = Path(__file__).parent / "measured.csv"
KEYS = ("compressor", "param_dtype", "ranks", "rate_mbps")
NUMBERS = (
    "timed_steps",
    "iteration_ms_median",
    "iteration_ms_p20",
    "iteration_ms_p80",
    "compute_ms_median",
    "compute_cpu_ms_median",
    "encode_cpu_ms_median",
    "decode_cpu_ms_median",
    "grad_wire_bytes_per_step",
    "param_wire_bytes_per_step",
    "achieved_sparsity",
)
FIELDS = (*KEYS, *NUMBERS, "wire_bytes_per_byte", "cores", "load", "git_commit")
ARMS = ("fsdp", "tagc2", "packed", "noop", "bf16", "tagc", "int8")


def plan_runs() -> Iterator[dict[str, Any]]:
    """The two runs that the transport is fitted to, every arm at one cap, then other caps, ranks and dtypes."""
    settings: list[tuple[str, int, int | None, tuple[str, ...]]] = [
        ("float32", 2, None, ("fsdp",)),
        ("float32", 2, 100, ARMS),
        ("float32", 2, 50, ("fsdp", "tagc2", "packed")),
        ("float32", 2, 400, ("fsdp", "tagc2", "packed")),
        ("float32", 4, 100, ("fsdp", "tagc2")),
        ("bfloat16", 2, 100, ("fsdp", "tagc2")),
    ]
    for param_dtype, ranks, rate_mbps, arms in settings:
        for arm in arms:
            yield {"compressor": arm, "param_dtype": param_dtype, "ranks": ranks, "rate_mbps": rate_mbps}


def measure(run: dict[str, Any], steps: int) -> dict[str, Any]:
    """One run of nano; returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        rate = "null" if run["rate_mbps"] is None else run["rate_mbps"]
        overrides = [
            f"compressor={run['compressor']}",
            f"trainer.param_dtype={run['param_dtype']}",
            f"cluster.ranks={run['ranks']}",
            f"bandwidth.rate_mbps={rate}",
            "network.time_dilation=1",
            f"trainer.max_steps={steps}",
            f"trainer.eval_every={steps}",
            "trainer.timing_warmup_steps=3",
            "logging.wandb=disabled",
            f"hydra.run.dir={folder}",
        ]
        subprocess.run([sys.executable, "run.py", *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        summary = load_summary(Path(folder))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    row = run | {key: summary[key] for key in NUMBERS}
    row = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
    row |= {"wire_bytes_per_byte": f"{WIRE_BYTES_PER_BYTE:.6g}", "cores": count_cores()}
    return row | {"load": f"{os.getloadavg()[0]:.1f}", "git_commit": commit.stdout.strip()}


def load_measured(path: Path = MEASURED) -> list[dict[str, Any]]:
    """The rows of a file of measured runs, numbers as numbers, empty cells as None."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    words = ("compressor", "param_dtype", "git_commit")
    return [{k: v if k in words else float(v) if v else None for k, v in row.items()} for row in rows]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeat", action="store_true", help="measure what is there already again")
    parser.add_argument("--steps", type=int, default=9, help="steps of every run; the first three are not timed")
    arguments = parser.parse_args()
    if arguments.repeat:
        MEASURED.unlink(missing_ok=True)
    known = {tuple(row[key] for key in KEYS) for row in load_measured()}
    for run in plan_runs():
        if tuple(run.values()) in known:
            continue
        row = measure(run, arguments.steps)
        append_row(MEASURED, row, FIELDS)
        sys.stdout.write(f"{' '.join(map(str, run.values()))}: {row['iteration_ms_median']} ms, load {row['load']}\n")


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
