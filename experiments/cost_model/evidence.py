"""What `python -m tagc.predict` needs of the recorded rows, and how far its model is from measured cells.

    python -m experiments.cost_model.evidence [--check]

Processor times come from measured.csv (int4 and weights, which it lacks, from the runs of experiments/loss), the
transport from validate.py's fit, losses from experiments/loss. Then every cell of experiments/iteration_time is
predicted; none was fitted. Writes tagc/predict/evidence.json, cells.csv and the table in docs/predict.md; with --check
it changes nothing and exits with 1 if one is not current.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from analysis.numbers.cells import summarise_cell
from analysis.numbers.losses import compare_losses
from analysis.records.load import Run, load_recorded
from experiments.cost_model.measure import load_measured
from experiments.cost_model.validate import MEASURED, fit_transport, make_row_units, measured_codec, nano
from experiments.rows import make_parser, write_rows
from tagc.config import ModelConfig
from tagc.host.files import write_text_atomic
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.predict.answer import METHODS, Plan, Question
from tagc.predict.evidence import CPU, PATH, Evidence

ROOT = Path(__file__).parents[2]
ROWS, CELLS, PAGE = ROOT / "experiments", Path(__file__).parent / "cells.csv", ROOT / "docs" / "predict.md"
BEGIN = "<!-- errors: made by `python -m experiments.cost_model.evidence`, do not edit -->"
END = "<!-- /errors -->"
TIMED = ("noop", "fsdp", "bf16", "tagc", "tagc2", "packed", "int8")  # in measured.csv
RUN_TIMED = ("lhc", "int4")  # in the runs of experiments/loss

Row = dict[str, Any]


def build_evidence(runs: Sequence[Run]) -> Row:
    """All but the errors. runs: of experiments/loss."""
    rows = load_measured(MEASURED)
    message_ms, transport = fit_transport(rows, [make_row_units(rows, row) for row in rows])
    flops = nano("fsdp", 2, "float32").flops_per_step
    cpu = {
        dtype: min(r["compute_cpu_ms_median"] for r in rows if r["ranks"] == 2 and r["param_dtype"] == dtype) / 1e3
        for dtype in ("float32", "bfloat16")
    }
    own = [
        run for run in runs if run.is_done and run.config["model.name"] == "nano" and run.config["cluster.ranks"] == 2
    ]
    codec = {name: vars(measured_codec(rows, name)) for name in TIMED}
    codec |= {name: _codec_of_runs(own, name) for name in RUN_TIMED}
    for times in codec.values():
        times.pop("weights_ns_per_element", None)
    whole, both = (_codec_of_runs(own, arm) for arm in ("int4", "int4 weights=delta4"))
    keys = ("encode_ns_per_element", "decode_ns_per_element")
    return {
        "losses": list(_list_losses(runs)),
        "codec": {name: _round(times) for name, times in codec.items()},
        "weights_ns_per_element": float(f"{sum(both[key] - whole[key] for key in keys):.4g}"),
        "cpu_s_per_flop": _round({dtype: seconds / flops for dtype, seconds in cpu.items()}),
        "transport": _round({"message_ms": message_ms, "transport_bytes_per_s": transport}),
    }


def _round(values: Row) -> Row:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}


def _codec_of_runs(runs: Sequence[Run], arm: str) -> Row:
    """The least CPU time of any run of the arm, as validate.py takes it."""
    numel = nano(arm.split(" ")[0], 2, "float32").numel
    summaries = [run.summary for run in runs if run.arm == arm]
    encode, decode = (min(s[f"{k}_cpu_ms_median"] for s in summaries) * 1e6 / numel for k in ("encode", "decode"))
    sparsity = summaries[0]["achieved_sparsity"]
    density = 1.0 if sparsity is None else 1 - sparsity
    return {"encode_ns_per_element": encode, "decode_ns_per_element": decode, "ranks": 2, "density": density}


def _list_losses(runs: Sequence[Run]) -> Iterator[Row]:
    """Every arm that has a run of ``fsdp`` to be compared with, by setting."""
    for line in compare_losses(runs).itertuples():
        if line.pairs and math.isfinite(line.degradation_frac):
            model, ranks = line.setting.split(", ")[:2]
            yield {
                "method": line.arm,
                "model": model,
                "ranks": int(ranks.split()[0]),
                "setting": line.setting,
                "n": int(line.pairs),
                "frac": round(line.degradation_frac, 5) + 0.0,  # no -0.0
                "low": _finite(line.degradation_frac_low),
                "high": _finite(line.degradation_frac_high),
            }


def _finite(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def predict_cells(evidence: Evidence) -> tuple[list[Row], list[tuple[int, int]]]:
    """One row per arm of every recorded cell: measured, modelled, and both savings against ``fsdp``.

    Then each cell's ranks and parameters.
    """
    rows: list[Row] = []
    settings = []
    for cell in load_recorded([ROWS / "iteration_time" / "rows"]).cells:
        table = summarise_cell(cell).set_index("arm")
        arms = [arm for arm in table.index if _method_of(arm) in (*METHODS, "lhc")]
        plans = {arm: _plan_cell(cell.shared, arm, table.loc[arm, "rate_mbps"], evidence) for arm in arms}
        predicted = {arm: plan.predict_ms() for arm, plan in plans.items()}
        settings.append((cell.shared["cell"]["ranks"], plans["fsdp"].workload.parameter_count))
        for arm, modelled_ms in predicted.items():
            measured_ms = table.loc[arm, "iteration_ms"]
            saved = modelled_saved = 0.0
            if arm != "fsdp":
                saved = table.loc[arm, "saved_vs_fsdp_frac"]
                modelled_saved = 1 - modelled_ms / predicted["fsdp"]
            rows.append(
                {
                    "network": table.loc[arm, "network"],
                    "cell": table.loc[arm, "cell"],
                    "rate_mbps": f"{table.loc[arm, 'rate_mbps']:.1f}",
                    "arm": arm,
                    "measured_ms": f"{measured_ms:.1f}",
                    "modelled_ms": f"{modelled_ms:.1f}",
                    "error_frac": round(modelled_ms / measured_ms - 1, 4),
                    "measured_saved_frac": round(saved, 4),
                    "modelled_saved_frac": round(modelled_saved, 4),
                }
            )
    return rows, settings


def _method_of(arm: str) -> str:
    return arm.replace("_", "+")  # int4_delta4


def _plan_cell(shared: Row, arm: str, rate_mbps: float, evidence: Evidence) -> Plan:
    cell, settings = shared["cell"], shared["settings"]
    prefix = "fsdp.model."
    model = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    question = Question(
        ModelConfig(**model),
        cell["vocab_size"] or settings["fsdp.data.vocab_size"],
        cell["ranks"],
        rate_mbps,
        CPU,
        cell["param_dtype"],
        micro_batch=settings["fsdp.trainer.global_batch"] // cell["ranks"],
        reshard=cell["reshard"],
    )
    return Plan(question, _method_of(arm), evidence, max(1.0, cell["ranks"] / shared["hardware"]["cpu_cores_usable"]))


def summarise_errors(cells: Sequence[Row], settings: Sequence[tuple[int, int]]) -> Row:
    """The errors of the cells' rows, and the range of what was compared. settings: ranks and parameters of cells."""
    errors = [abs(row["error_frac"]) for row in cells]
    saved = [abs(row["modelled_saved_frac"] - row["measured_saved_frac"]) for row in cells if row["arm"] != "fsdp"]
    rates = [float(row["rate_mbps"]) for row in cells]
    counts = [parameters for _, parameters in settings]
    return {
        "rows": len(cells),
        "cells": len({(row["network"], row["cell"]) for row in cells}),
        "median": round(median(errors), 4),
        "max": max(errors),
        "saved_median": round(median(saved), 4),
        "saved_p90": round(quantiles(saved, n=10)[-1], 4),
        "saved_max": round(max(saved), 4),
        "methods": sorted({_method_of(row["arm"]) for row in cells}),
        "ranks": sorted({ranks for ranks, _ in settings}),
        "rate_mbps": [min(rates), max(rates)],
        "parameters": [min(counts), max(counts)],
    }


def make_table(cells: Sequence[Row], errors: Row) -> str:
    """The block of docs/predict.md."""
    lines = [
        f"{errors['rows']} rows of {errors['cells']} cells: the time of an iteration is off by {errors['median']:.1%} "
        f"(median) and at most {errors['max']:.1%},",
        f"the share saved against `fsdp` by {100 * errors['saved_median']:.1f} points (median), nine in ten by at most "
        f"{100 * errors['saved_p90']:.1f}, all by at most {100 * errors['saved_max']:.1f}.",
        "",
        "| cell | Mbit/s | arm | measured, ms | modelled, ms | error | saved, measured | saved, modelled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in cells:
        kind = "" if row["network"] == "namespaces" else f" ({row['network']})"
        saved = ("", "") if row["arm"] == "fsdp" else (row["measured_saved_frac"], row["modelled_saved_frac"])
        shown = [f"{value:+.1%}" if value != "" else "-" for value in saved]
        lines.append(
            f"| {row['cell']}{kind} | {row['rate_mbps']} | `{row['arm']}` | {row['measured_ms']} | "
            f"{row['modelled_ms']} | {row['error_frac']:+.1%} | {shown[0]} | {shown[1]} |"
        )
    return "\n".join([BEGIN, "", *lines, "", END])


def make_files() -> dict[Path, str]:
    """Every file that this command writes, with its text."""
    base = build_evidence(load_recorded([ROWS / "loss" / "rows"]).runs)
    cells, settings = predict_cells(Evidence(base))
    errors = summarise_errors(cells, settings)
    table = io.StringIO()
    with redirect_stdout(table):
        write_rows(None, cells)
    page = PAGE.read_text()
    begin, end = page.index(BEGIN), page.index(END) + len(END)
    return {
        PATH: json.dumps({**base, "errors": errors}, indent=1) + "\n",
        CELLS: table.getvalue(),
        PAGE: page[:begin] + make_table(cells, errors) + page[end:],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is not current")
    check = parser.parse_args().check
    files = make_files()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        sys.exit("not current: " + ", ".join(str(path.relative_to(ROOT)) for path in stale))
    for path in stale:
        write_text_atomic(path, files[path])


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        main()
