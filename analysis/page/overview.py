"""The papers' tables over all cells: iteration time and gradient communication by link; and what is modelled beyond."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.numbers.cells import read_estimate
from analysis.page.cell_tables import describe_link, format_saving
from analysis.page.sheet import MISSING, Sheet, format_estimate, format_number, format_range
from analysis.records.cells import Cell

MODEL_ARMS = ("noop", "fsdp", "bf16", "tagc", "tagc2", "packed", "int8")
MODEL_RATES_GBPS = (1.0, 10.0, 100.0)


def make_iteration_sheet(cells: Sequence[Cell], table: pd.DataFrame) -> Sheet:
    """Iteration time by link and arm, with what it saves against ``fsdp`` and ``bf16``."""
    links = {(cell.shared["cell"]["key"], cell.shared["cell"]["network"]): describe_link(cell) for cell in cells}
    lines = [
        (
            line["setting"],
            f"{links[line['cell'], line['network']]}, {line['network']}",
            line["arm"],
            str(line["steps"]),
            f"{line['iteration_ms']:.0f} ({line['iteration_ms_p20']:.0f}-{line['iteration_ms_p80']:.0f})",
            format_saving(line, "fsdp"),
            format_saving(line, "bf16"),
        )
        for _, line in table.iterrows()
    ]
    note = (
        "Median of the timed steps; arms took turns in the same processes. Shorter: paired by block, median and 95 % "
        f"bootstrap interval over {format_range(table['blocks'])} blocks. `noop` is the ceiling."
    )
    headers = ("setting", "link", "arm", "steps", "ms per step (p20-p80)", "shorter than fsdp", "shorter than bf16")
    return Sheet("iteration_time", "Iteration time by link", note, headers, lines, table)


def make_gradient_sheet(table: pd.DataFrame) -> Sheet:
    """Time of the gradient communication, encoding and decoding included."""
    shown = table[(table["bytes_counted_by"] == "exchange") & table["gradient_comm_ms"].notna()]
    lines = [
        (
            line["cell"],
            line["network"],
            line["arm"],
            f"{line['gradient_comm_ms']:.0f}",
            format_number(line["encode_ms"] + line["decode_ms"], ".0f"),
            MISSING if line["arm"] == "fsdp" else format_estimate(read_estimate(line, "saved_gradient_comm_frac")),
        )
        for _, line in shown.iterrows()
    ]
    note = (
        "Busy time per step of exchanging gradients, encoding and decoding; it overlaps with computation and with the "
        "other rank's, so it is more than what a step waits for. Less than fsdp: paired by block, 95 % interval."
    )
    headers = ("cell", "network", "arm", "gradient communication, ms", "encode + decode, ms", "less than fsdp (95 %)")
    return Sheet("gradient_communication", "Gradient communication", note, headers, lines, shown)


def make_scaling_sheet(modelled: pd.DataFrame) -> Sheet:
    """Modelled share of ``fsdp``'s time that each arm saves, by ranks."""
    rows = modelled[modelled["rate_gbps"].isin(MODEL_RATES_GBPS)] if len(modelled) else modelled
    arms = [arm for arm in MODEL_ARMS if arm in rows and arm != "fsdp"]
    lines = [
        (
            "modelled",
            line["workload"],
            line["param_dtype"],
            str(line["ranks"]),
            f"{line['rate_gbps']:g}",
            format_number(line["fsdp"], ".4g"),
            *(f"{1 - line[arm] / line['fsdp']:+.1%}" for arm in arms),
        )
        for _, line in rows.iterrows()
    ]
    note = "Modelled by experiments/cost_model, nothing measured: share of fsdp's iteration time that an arm saves."
    headers = ("kind", "workload", "parameters", "ranks", "Gbit/s", "fsdp, ms", *arms)
    return Sheet("scaling", "Scaling with ranks (modelled)", note, headers, lines, modelled)


def make_modelled_crossover_sheet(crossovers: pd.DataFrame) -> Sheet:
    """Modelled bandwidth up to which an arm pays."""
    pairs = [column for column in crossovers if column.endswith(("_over_fsdp_gbps", "_over_bf16_gbps"))]
    shown = [pair for pair in pairs if pair.startswith(("tagc_", "tagc2_", "packed_", "int8_", "bf16_over_fsdp"))]
    lines = [
        (
            "modelled",
            line["workload"],
            line["param_dtype"],
            str(line["ranks"]),
            *(format_number(line[pair], ".3g") for pair in shown),
        )
        for _, line in crossovers.iterrows()
    ]
    note = "Modelled: Gbit/s up to which an arm is at least 0.1 % faster than fsdp or bf16; `-`: nowhere."
    names = [pair.removesuffix("_gbps").replace("_over_", " / ") for pair in shown]
    headers = ("kind", "workload", "parameters", "ranks", *names)
    return Sheet("modelled_crossover", "Crossover bandwidth (modelled)", note, headers, lines, crossovers)
