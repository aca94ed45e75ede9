"""Fit the cost model's transport to a few measured runs, and judge it by the others.

    python -m experiments.cost_model.validate [--compensate-load]

Processor times are CPU times at 2 ranks and fp32 parameters: computing (the least of all arms), encoding and decoding
(the least of an arm's runs). Two numbers are fitted to ``fsdp`` alone, uncapped and at 100 Mbit/s: the cost of a
message and the transport's own rate. All other rows are predicted: other caps, other arms, 4 ranks, bf16 parameters.
Prints the table and writes validation.csv.

``--compensate-load`` is for a machine that does other work meanwhile: it stretches a row's processor times by the wall
time over the CPU time of the computation in that very run. Such rows test the link and the overlap, not the processor.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.cost_model.inputs import CodecTimes, Workload, build_workload, make_units
from experiments.cost_model.measure import load_measured
from tagc.cli import compose_config
from tagc.network.cost_model import LinkCost, predict_iteration_ms

VALIDATION = Path(__file__).parent / "validation.csv"
VOCAB = 4096
FITTED = (("fsdp", None), ("fsdp", 100.0))  # (compressor, rate_mbps) at 2 ranks, fp32 parameters
MESSAGE_MS = [0.0, *(10 ** (i / 8) for i in range(-24, 17))]
TRANSPORT_BYTES_PER_S = [10 ** (7.5 + i / 8) for i in range(21)]

Row = dict[str, Any]


def is_input(row: Row) -> bool:
    """Whether a row gives processor times."""
    return row["ranks"] == 2 and row["param_dtype"] == "float32"


def measured_compute_ms(rows: list[Row]) -> float:
    """CPU time of a step's computation at 2 ranks: the least that any arm needed, since other load only adds."""
    return min(row["compute_cpu_ms_median"] for row in rows if is_input(row))


def measured_codec(rows: list[Row], compressor: str) -> CodecTimes:
    """Codec times of an arm per element of the buckets it compresses."""
    inputs = [row for row in rows if is_input(row) and row["compressor"] == compressor]
    numel = nano(compressor, 2, "float32").numel
    encode, decode = (
        min(row[f"{name}_cpu_ms_median"] for row in inputs) * 1e6 / numel for name in ("encode", "decode")
    )
    sparsity = inputs[0]["achieved_sparsity"]
    return CodecTimes(encode, decode, 2, 1.0 if sparsity is None else 1 - sparsity)


def nano(compressor: str, ranks: int, param_dtype: str) -> Workload:
    """The workload that measure.py runs."""
    overrides = [f"compressor={compressor}", f"cluster.ranks={ranks}", f"trainer.param_dtype={param_dtype}"]
    return build_workload(compose_config(overrides), VOCAB)


def predict(rows: list[Row], row: Row, message_ms: float, transport: float, compensate: bool) -> float:
    """Modelled iteration time of a measured row, in ms."""
    ranks = int(row["ranks"])
    workload = nano(row["compressor"], ranks, row["param_dtype"])
    cores = os.cpu_count() or 1
    slowdown = max(1.0, ranks / cores)  # ranks of one thread each that share cores
    if compensate:
        slowdown *= max(1.0, row["compute_ms_median"] / row["compute_cpu_ms_median"])
    # The global batch is the same for any number of ranks.
    compute_ms = measured_compute_ms(rows) * 2 / ranks * slowdown
    units = make_units(workload, compute_ms, measured_codec(rows, row["compressor"]), slowdown)
    rate = math.inf if row["rate_mbps"] is None else row["rate_mbps"] * 1e6 / 8
    return predict_iteration_ms(units, LinkCost(ranks, rate, transport, message_ms))


def fit_transport(rows: list[Row], compensate: bool) -> tuple[float, float]:
    """Cost of a message in ms and the transport's rate in bytes per second that explain the fitted rows best."""
    fitted = [row for row in rows if is_fitted(row)]

    def misfit(guess: tuple[float, float]) -> float:
        return sum(math.log(predict(rows, row, *guess, compensate) / row["iteration_ms_median"]) ** 2 for row in fitted)

    return min(itertools.product(MESSAGE_MS, TRANSPORT_BYTES_PER_S), key=misfit)


def is_fitted(row: Row) -> bool:
    """Whether the transport's two numbers were fitted to this row."""
    key = (row["compressor"], row["rate_mbps"])
    return key in FITTED and row["ranks"] == 2 and row["param_dtype"] == "float32"


def validate_rows(rows: list[Row], compensate: bool) -> list[Row]:
    """One row per measured run: measured, modelled, error."""
    message_ms, transport = fit_transport(rows, compensate)
    result = []
    for row in rows:
        modelled_ms = predict(rows, row, message_ms, transport, compensate)
        result.append(
            {key: row[key] for key in ("compressor", "param_dtype", "ranks", "rate_mbps")}
            | {
                "role": "fitted" if is_fitted(row) else "predicted",
                "measured_ms": round(row["iteration_ms_median"], 1),
                "modelled_ms": round(modelled_ms, 1),
                "error_frac": round(modelled_ms / row["iteration_ms_median"] - 1, 3),
                "load_is_compensated": compensate,
                "message_ms": f"{message_ms:.3g}",
                "transport_bytes_per_s": f"{transport:.3g}",
                "is_provisional": row["load"] > (os.cpu_count() or 1) + 1,
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compensate-load", action="store_true", help="for rows measured beside other work")
    rows = validate_rows(load_measured(), parser.parse_args().compensate_load)
    with VALIDATION.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console(width=170)
    console.print(table)
    errors = [abs(row["error_frac"]) for row in rows if row["role"] == "predicted"]
    console.print(
        f"{len(errors)} predicted rows: error at most {max(errors):.1%}, median {median(errors):.1%}, "
        f"{sum(error <= 0.15 for error in errors)} within 15 %"
    )


if __name__ == "__main__":
    main()
