"""Fit the cost model's transport to a few measured runs, and judge it by the others.

    python -m experiments.cost_model.validate

Processor times are CPU times at 2 ranks and fp32 parameters, from measured.csv: computing (the least of all arms),
encoding and decoding (the least of an arm's runs). In each file of measured rows two numbers are fitted to two rows of
``fsdp``, without a cap that binds and at 100 Mbit/s: the cost of a message and the transport's own rate. All other rows
are predicted: other caps, other arms, 4 ranks, bf16 parameters. Prints the table and writes validation.csv.

A row that was measured beside other work (``load`` above the cores) is provisional: its processor times are stretched
by the wall time over the CPU time of the computation in that very run, so it tests link and overlap only.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.cost_model.measure import KEYS, MEASURED, load_measured
from experiments.rows import write_rows
from tagc.cli.entry import compose_config
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.predict.cost_model import LinkCost, UnitCost, predict_iteration_ms
from tagc.predict.inputs import CodecTimes, Workload, build_workload, make_units

VALIDATION = Path(__file__).parent / "validation.csv"
FROM_README = Path(__file__).parent / "measured_readme.csv"  # an earlier table of the README, 55 timed steps a row
VOCAB = 4096
FITTED_MBPS = (None, 10_000, 100)  # of fsdp at 2 ranks, fp32 parameters; 10 Gbit/s binds nowhere here
MESSAGE_MS = [0.0, *(10 ** (i / 4) for i in range(-8, 9, 1))]
TRANSPORT_BYTES_PER_S = [10 ** (7.5 + i / 4) for i in range(11)]

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


@cache
def nano(compressor: str, ranks: int, param_dtype: str) -> Workload:
    """The workload that measure.py runs."""
    overrides = [f"compressor={compressor}", f"cluster.ranks={ranks}", f"trainer.param_dtype={param_dtype}"]
    return build_workload(compose_config(overrides), VOCAB)


def make_row_units(inputs: list[Row], row: Row) -> list[UnitCost]:
    """The units of a measured row, from the processor times of ``inputs``."""
    ranks = int(row["ranks"])
    slowdown = max(1.0, ranks / row["cores"])  # ranks of one thread each that share cores
    if is_provisional(row):
        slowdown *= max(1.0, row["compute_ms_median"] / row["compute_cpu_ms_median"])
    # The global batch is the same for any number of ranks.
    compute_ms = measured_compute_ms(inputs) * 2 / ranks * slowdown
    codec = measured_codec(inputs, row["compressor"])
    return make_units(nano(row["compressor"], ranks, row["param_dtype"]), compute_ms, codec, slowdown)


def predict(units: list[UnitCost], row: Row, message_ms: float, transport: float) -> float:
    """Modelled iteration time of a measured row, in ms."""
    rate = math.inf if row["rate_mbps"] is None else row["rate_mbps"] * 1e6 / 8
    link = LinkCost(int(row["ranks"]), rate, transport, message_ms, wire_bytes_per_byte=row["wire_bytes_per_byte"])
    return predict_iteration_ms(units, link)


def fit_transport(rows: list[Row], units: list[list[UnitCost]]) -> tuple[float, float]:
    """Cost of a message in ms and the transport's rate in bytes per second that explain the fitted rows best."""
    fitted = [(row, costs) for row, costs in zip(rows, units, strict=True) if is_fitted(row)]

    def misfit(guess: tuple[float, float]) -> float:
        return sum(math.log(predict(costs, row, *guess) / row["iteration_ms_median"]) ** 2 for row, costs in fitted)

    return min(itertools.product(MESSAGE_MS, TRANSPORT_BYTES_PER_S), key=misfit)


def is_fitted(row: Row) -> bool:
    """Whether the transport's two numbers were fitted to this row."""
    return row["compressor"] == "fsdp" and row["rate_mbps"] in FITTED_MBPS and is_input(row)


def is_provisional(row: Row) -> bool:
    """Whether other work disturbed the run."""
    return (row["load"] or 0) > row["cores"] + 1


def validate_rows(inputs: list[Row], rows: list[Row], source: str) -> list[Row]:
    """One row per measured run of a file: measured, modelled, error."""
    units = [make_row_units(inputs, row) for row in rows]
    message_ms, transport = fit_transport(rows, units)
    result = []
    for row, costs in zip(rows, units, strict=True):
        modelled_ms = predict(costs, row, message_ms, transport)
        result.append(
            {key: row[key] for key in KEYS}
            | {"ranks": int(row["ranks"])}
            | {
                "role": "fitted" if is_fitted(row) else "predicted",
                "measured_ms": round(row["iteration_ms_median"], 1),
                "modelled_ms": round(modelled_ms, 1),
                "error_frac": round(modelled_ms / row["iteration_ms_median"] - 1, 3),
                "message_ms": f"{message_ms:.3g}",
                "transport_mb_per_s": f"{transport / 1e6:.3g}",
                "is_provisional": is_provisional(row),
                "source": source,
            }
        )
    return result


def main() -> None:
    inputs = load_measured()
    rows = [line for path in (MEASURED, FROM_README) for line in validate_rows(inputs, load_measured(path), path.name)]
    write_rows(VALIDATION, rows)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console(width=170)
    console.print(table)
    for source in dict.fromkeys(row["source"] for row in rows):
        errors = [abs(row["error_frac"]) for row in rows if row["role"] == "predicted" and row["source"] == source]
        console.print(
            f"{source}: {len(errors)} predicted rows, error at most {max(errors):.1%}, median {median(errors):.1%}, "
            f"{sum(error <= 0.15 for error in errors)} within 15 %"
        )


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
