"""The tables: on the terminal, as Markdown and as CSV.

    python -m experiments.iteration_time.table [--rows DIR] [--out DIR]

writes ``table.md``, ``table.csv`` (one line per cell and arm) and ``crossover.csv``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.iteration_time.record import ROWS_DIR, load_cells
from experiments.iteration_time.stats import find_crossovers, pair_blocks, saved_time, summarise_cell
from tagc.errors import UserError
from tagc.record.files import write_text_atomic

NETWORKS = ("namespaces", "paced")
MISSING = "-"
PIPE_WIDTH = 200


@dataclass
class Sheet:
    """A titled table of text, with a line of explanation."""

    title: str
    note: str
    headers: Sequence[str]
    lines: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """Title, note and a pipe table."""
        cells = [self.headers, ["---"] * len(self.headers), *self.lines]
        return "\n".join([f"### {self.title}", "", self.note, "", *(f"| {' | '.join(line)} |" for line in cells), ""])

    def to_rich(self) -> Table:
        """The same for a terminal."""
        table = Table(*self.headers, title=self.title, caption=self.note, box=box.SIMPLE, title_justify="left")
        for line in self.lines:
            table.add_row(*line)
        return table


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None or pd.isna(value) else format(value, form)


def _interval(line: pd.Series, name: str) -> str:
    middle, low, high = (line[f"saved_vs_{name}_frac{suffix}"] for suffix in ("", "_low", "_high"))
    return MISSING if pd.isna(middle) or line["arm"] == name else f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


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


def make_cell_sheet(shared: dict[str, Any], table: pd.DataFrame) -> Sheet:
    """One cell: what was measured, arm by arm."""
    lines = [
        (
            line["arm"],
            f"{line['iteration_ms']:.0f} ({line['iteration_ms_p20']:.0f}-{line['iteration_ms_p80']:.0f})",
            _number(line["sent_bytes"] / 1e6, ".2f"),
            _number(line["saved_bytes_frac"], ".1%"),
            _interval(line, "fsdp"),
            _interval(line, "bf16"),
            _number(line["realised_frac"], ".0%"),
            _number(line["exposed_comm_ms"], ".0f"),
            _number(line["encode_ms"] + line["decode_ms"], ".0f"),
            _number(line["dense_frac"], ".0%"),
        )
        for _, line in table.iterrows()
    ]
    title = f"{shared['cell']['key']} ({shared['cell']['network']})"
    return Sheet(title, _describe(shared, table), CELL_HEADERS, lines)


def _describe(shared: dict[str, Any], table: pd.DataFrame) -> str:
    link, measured = shared["link"], shared["link"]["measured"]
    rate = "no cap" if link["rate_mbps"] is None else f"{link['rate_mbps']:.4g} Mbit/s"
    if link["reference_gpu"]:
        scaled_ms = table.set_index("arm")["scaled_iteration_ms"]["fsdp"]
        rate += f" = {link['nominal_mbps']:g} on {link['reference_gpu']} over time dilation {link['time_dilation']:.4g}"
        rate += f" (scaled time of fsdp {scaled_ms:.3g} ms)"
    dirty = " with local changes" if shared["git_dirty"] else ""
    return (
        f"Link {rate}; computation {measured['compute_s'] * 1e3:.0f} ms per step; {table['steps'].min()} timed steps "
        f"per arm in {shared['cell']['blocks']} blocks; {shared['hardware']['cpu_model']}, torch "
        f"{shared['versions']['torch']}, commit {(shared['git_commit'] or 'unknown')[:7]}{dirty}."
    )


def make_transport_sheet(cells: Sequence[tuple[dict[str, Any], pd.DataFrame]]) -> Sheet:
    """FSDP2 on this project's exchange against FSDP2 on gloo's own collectives: the share that is no compressor's."""
    lines = []
    for shared, rows in cells:
        blocks = pair_blocks(rows)
        middle, low, high = saved_time(blocks, "fsdp", "fsdp_gloo")
        if not pd.isna(middle):
            times = [f"{blocks[arm].median():.0f}" for arm in ("fsdp_gloo", "fsdp")]
            lines.append((shared["cell"]["key"], *times, f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"))
    note = "No compression in either: `fsdp_gloo` uses gloo's collectives, `fsdp` this project's exchange."
    return Sheet("The transport alone", note, ("cell", "fsdp_gloo, ms", "fsdp, ms", "shorter (95 %)"), lines)


def make_memory_sheet(cells: Sequence[tuple[dict[str, Any], pd.DataFrame]]) -> Sheet:
    """Memory of a rank, once per model, ranks and arm."""
    lines: dict[tuple[str, ...], tuple[str, ...]] = {}
    for shared, _ in cells:
        cell = shared["cell"]
        setting = (cell["model"], str(cell["ranks"]), cell["param_dtype"], "yes" if cell["reshard"] else "no")
        for arm, memory in shared["memory"].items():
            parts = [memory[f"{part}_bytes"] for part in ("parameter", "gradient", "optimizer", "residual")]
            values = [*parts, sum(parts), memory["peak_rss_bytes"]]
            shown = (_number(value and value / 1e6, ".1f") if value != 0 else "0" for value in values)
            lines.setdefault((*setting, arm), (*setting, arm, *shown))
    headers = ("model", "ranks", "parameters in", "reshard", "arm", "parameters", "gradients", "optimizer", "residuals")
    note = (
        "MB per rank. State: what the tensors take. Peak: how far the process grew from building the arm to the end of "
        "its first steps, activations and buffers included; the first arm also loads what all share."
    )
    return Sheet("Memory", note, (*headers, "state", "peak"), list(lines.values()))


def make_agreement_sheet(table: pd.DataFrame) -> Sheet:
    """The same cells at the same rate on both kinds of capped link."""
    keys = ["cell", "arm", "rate_mbps"]
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
    return Sheet("Namespaces against paced", note, ("cell", "arm", "namespaces, ms", "paced, ms", "difference"), lines)


def make_crossover_sheet(crossovers: pd.DataFrame) -> Sheet:
    """Where compression stops paying."""
    signs = {"interpolated": "", "above": "> ", "below": "< "}
    lines = [
        (c.setting, c.network, c.arm, c.baseline, f"{signs[c.bound]}{c.crossover_mbps:.0f}")
        for c in crossovers.itertuples()
    ]
    note = (
        "Rate on this machine above which the arm is no longer faster, interpolated between measured rates over their "
        "logarithm; `>` and `<`: beyond all measured rates."
    )
    return Sheet("Crossover", note, ("setting", "network", "arm", "against", "Mbit/s"), lines)


def make_console() -> Console:
    """A console whose tables are not cut where there is no terminal to fit."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def report(rows_dir: Path, out_dir: Path, console: Console) -> None:
    """Write the three files and show the tables. Errors: ``UserError`` if nothing is recorded."""
    cells = load_cells(rows_dir, NETWORKS)
    tables = [summarise_cell(shared, rows) for shared, rows in cells]
    table = pd.concat(tables, ignore_index=True)
    crossovers = find_crossovers(table)
    sheets = [make_cell_sheet(shared, part) for (shared, _), part in zip(cells, tables, strict=True)]
    sheets += [make_transport_sheet(cells), make_agreement_sheet(table), make_memory_sheet(cells)]
    sheets.append(make_crossover_sheet(crossovers))
    sheets = [sheet for sheet in sheets if sheet.lines]
    out_dir.mkdir(parents=True, exist_ok=True)
    heading = "# Iteration time\n\nMade by `python -m experiments.iteration_time.table` from the recorded rows.\n\n"
    write_text_atomic(out_dir / "table.md", heading + "\n".join(sheet.to_markdown() for sheet in sheets))
    write_text_atomic(out_dir / "table.csv", table.round(5).to_csv(index=False))
    write_text_atomic(out_dir / "crossover.csv", crossovers.round(1).to_csv(index=False))
    for sheet in sheets:
        console.print(sheet.to_rich())
    console.print(f"{out_dir / 'table.md'}, {out_dir / 'table.csv'}, {out_dir / 'crossover.csv'}")


def main() -> None:
    """Parse and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS_DIR, help="the recorded rows")
    parser.add_argument("--out", type=Path, default=ROWS_DIR.parent, help="where the files go")
    options = parser.parse_args()
    report(options.rows, options.out, make_console())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
