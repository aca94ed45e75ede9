"""The tables of the iteration-time experiment, and the files that they are committed as."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.numbers.cells import find_crossovers, pair_blocks, read_estimate, summarise_cell
from analysis.numbers.stats import paired_saving
from analysis.page.sheet import MISSING, Sheet, format_estimate, format_number
from analysis.records.cells import NETWORKS, Cell, load_cells
from tagc.host.files import write_text_atomic

CELL_HEADERS = (
    "arm",
    "ms per step (p20-p80)",
    "MB sent",
    "bytes saved",
    "shorter than fsdp (95 %)",
    "shorter than bf16 (95 %)",
    "saved bytes turned into time",
    "exposed comm, ms",
    "encode + decode, ms",
    "went dense",
)

MEMORY_PARTS = ("parameter", "gradient", "optimizer", "residual", "replica")


def format_saving(line: pd.Series, baseline: str) -> str:
    """The saved share of the baseline's time, with its interval; ``-`` for the baseline itself."""
    estimate = read_estimate(line, f"saved_vs_{baseline}_frac")
    return MISSING if line["arm"] == baseline else format_estimate(estimate)


def make_cell_sheet(cell: Cell, table: pd.DataFrame) -> Sheet:
    """One cell: what was measured, arm by arm."""
    lines = [
        (
            line["arm"],
            f"{line['iteration_ms']:.0f} ({line['iteration_ms_p20']:.0f}-{line['iteration_ms_p80']:.0f})",
            format_number(line["sent_bytes"] / 1e6, ".2f"),
            format_number(line["saved_bytes_frac"], ".1%"),
            format_saving(line, "fsdp"),
            format_saving(line, "bf16"),
            format_number(line["realised_frac"], ".0%"),
            format_number(line["exposed_comm_ms"], ".0f"),
            format_number(line["encode_ms"] + line["decode_ms"], ".0f"),
            format_number(line["dense_frac"], ".0%"),
        )
        for _, line in table.iterrows()
    ]
    key, network = cell.shared["cell"]["key"], cell.shared["cell"]["network"]
    return Sheet(f"cell-{network}-{key}", f"{key} ({network})", describe_cell(cell, table), CELL_HEADERS, lines, table)


def describe_link(cell: Cell) -> str:
    """The cap as a reader needs it: rate here and, where time is dilated, the rate it stands for."""
    link = cell.shared["link"]
    if link["rate_mbps"] is None:
        return "no cap"
    rate = f"{link['rate_mbps']:.4g} Mbit/s"
    if not link["reference_gpu"]:
        return rate
    return (
        f"{rate} = {link['nominal_mbps']:g} on {link['reference_gpu']} over time dilation {link['time_dilation']:.4g}"
    )


def describe_commit(git_commit: str | None, git_dirty: bool | None) -> str:
    """Seven digits, and whether files were changed."""
    return f"{(git_commit or 'unknown')[:7]}{' with local changes' if git_dirty else ''}"


def describe_cell(cell: Cell, table: pd.DataFrame) -> str:
    """One line: link, computation, n, machine, versions, commit."""
    shared, rate = cell.shared, describe_link(cell)
    if shared["link"]["reference_gpu"]:
        rate += f" (scaled time of fsdp {table.set_index('arm')['scaled_iteration_ms']['fsdp']:.3g} ms)"
    return (
        f"Link {rate}; computation {shared['link']['measured']['compute_s'] * 1e3:.0f} ms per step; "
        f"{table['steps'].min()} timed steps per arm in {shared['cell']['blocks']} blocks; "
        f"{shared['hardware']['cpu_model']}, torch {shared['versions']['torch']}, "
        f"commit {describe_commit(shared['git_commit'], shared['git_dirty'])}."
    )


def make_transport_sheet(cells: Sequence[Cell]) -> Sheet:
    """FSDP2 on this project's exchange against FSDP2 on gloo's own collectives: the share that is no compressor's."""
    lines = []
    for cell in cells:
        blocks = pair_blocks(cell.rows)
        estimate = paired_saving(blocks, "fsdp", "fsdp_gloo")
        if estimate.n:
            times = [f"{blocks[arm].median():.0f}" for arm in ("fsdp_gloo", "fsdp")]
            lines.append((cell.shared["cell"]["key"], *times, format_estimate(estimate)))
    note = "No compression in either: `fsdp_gloo` uses gloo's collectives, `fsdp` this project's exchange."
    headers = ("cell", "fsdp_gloo, ms", "fsdp, ms", "shorter (95 %)")
    return Sheet("transport", "The transport alone", note, headers, lines)


def make_memory_sheet(cells: Sequence[Cell]) -> Sheet:
    """Memory of a rank, once per model, ranks and arm."""
    lines: dict[tuple[str, ...], tuple[str, ...]] = {}
    for shared, _ in cells:
        cell = shared["cell"]
        setting = (cell["model"], str(cell["ranks"]), cell["param_dtype"], "yes" if cell["reshard"] else "no")
        for arm, memory in shared["memory"].items():
            # Cells that were recorded before there were replicas have none.
            parts = [memory.get(f"{part}_bytes", 0) for part in MEMORY_PARTS]
            values = [*parts, sum(parts), memory["peak_rss_bytes"]]
            shown = (format_number(value and value / 1e6, ".1f") if value != 0 else "0" for value in values)
            lines.setdefault((*setting, arm), (*setting, arm, *shown))
    headers = ("model", "ranks", "parameters in", "reshard", "arm")
    parts_headers = ("parameters", "gradients", "optimizer", "residuals", "replicas")
    note = (
        "MB per rank. State: what the tensors take. Peak: how far the process grew from building the arm to the end of "
        "its first steps, activations and buffers included; the first arm also loads what all share."
    )
    return Sheet("memory", "Memory", note, (*headers, *parts_headers, "state", "peak"), list(lines.values()))


def make_agreement_sheet(table: pd.DataFrame) -> Sheet:
    """The same cells at the same rate on both kinds of capped link of one machine."""
    keys = ["cell", "arm", "rate_mbps", "machine"]
    kernel, paced = (table[table["network"] == network] for network in NETWORKS)
    both = kernel.merge(paced, on=keys, suffixes=("", "_paced")) if len(paced) and len(kernel) else table.head(0)
    lines = [
        (
            line["cell"],
            line["arm"],
            f"{line['iteration_ms']:.0f}",
            f"{line['iteration_ms_paced']:.0f}",
            f"{line['iteration_ms_paced'] / line['iteration_ms'] - 1:+.1%}",
        )
        for _, line in both.iterrows()
    ]
    note = "Median iteration times of cells with a fixed rate, the link capped by the kernel and in process."
    headers = ("cell", "arm", "namespaces, ms", "paced, ms", "difference")
    return Sheet("agreement", "Namespaces against paced", note, headers, lines)


def format_crossover(bound: str, rate_mbps: float) -> str:
    """Mbit/s; ``>`` and ``<``: beyond all measured rates.

    >>> format_crossover("below", 85.4)
    '< 85'
    """
    signs = {"interpolated": "", "above": "> ", "below": "< "}
    return f"{signs[bound]}{rate_mbps:.0f}"


def make_crossover_sheet(crossovers: pd.DataFrame) -> Sheet:
    """Where compression stops paying."""
    lines = [
        (c.setting, c.network, c.arm, c.baseline, format_crossover(c.bound, c.crossover_mbps), str(c.rates))
        for c in crossovers.itertuples()
    ]
    note = (
        "Rate on this machine above which the arm is no longer faster, interpolated between measured rates over their "
        "logarithm; `>` and `<`: beyond all measured rates."
    )
    headers = ("setting", "network", "arm", "against", "Mbit/s", "rates measured")
    return Sheet("crossover", "Crossover", note, headers, lines, crossovers)


def make_cell_sheets(cells: Sequence[Cell], tables: Sequence[pd.DataFrame]) -> list[Sheet]:
    """Every table of the experiment that has a line."""
    table = pd.concat(tables, ignore_index=True)
    sheets = [make_cell_sheet(cell, part) for cell, part in zip(cells, tables, strict=True)]
    sheets += [make_transport_sheet(cells), make_agreement_sheet(table), make_memory_sheet(cells)]
    sheets.append(make_crossover_sheet(find_crossovers(table)))
    return [sheet for sheet in sheets if sheet.lines]


def write_cell_tables(rows_dir: Path, out_dir: Path) -> list[Sheet]:
    """Write ``table.md``, ``table.csv`` (one line per cell and arm) and ``crossover.csv``; returns what they show.

    Errors: ``UserError`` if nothing is recorded, or a recorded file is damaged.
    """
    cells = load_cells(rows_dir)
    tables = [summarise_cell(cell) for cell in cells]
    sheets = make_cell_sheets(cells, tables)
    out_dir.mkdir(parents=True, exist_ok=True)
    heading = "# Iteration time\n\nMade by `python -m experiments.iteration_time.table` from the recorded rows.\n\n"
    table = pd.concat(tables, ignore_index=True)
    write_text_atomic(out_dir / "table.md", heading + "\n".join(sheet.to_markdown() for sheet in sheets))
    write_text_atomic(out_dir / "table.csv", table.round(5).to_csv(index=False))
    write_text_atomic(out_dir / "crossover.csv", find_crossovers(table).round(1).to_csv(index=False))
    return sheets
