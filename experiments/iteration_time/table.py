"""The tables of this experiment: on the terminal, as Markdown and as CSV. Their numbers come from ``analysis``.

    python -m experiments.iteration_time.table [--rows DIR] [--out DIR]

writes ``table.md``, ``table.csv`` (one line per cell and arm) and ``crossover.csv``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from analysis.page.cell_tables import write_cell_tables
from experiments.iteration_time.record import ROWS_DIR
from tagc.host.pipe import closed_pipe_ends_quietly

PIPE_WIDTH = 200


def make_console() -> Console:
    """A console whose tables are not cut where there is no terminal to fit."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def report(rows_dir: Path, out_dir: Path, console: Console) -> None:
    """Write the three files and show the tables. Errors: ``UserError`` if nothing is recorded."""
    for sheet in write_cell_tables(rows_dir, out_dir):
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
    with closed_pipe_ends_quietly():
        main()
