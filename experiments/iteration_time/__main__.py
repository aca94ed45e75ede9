"""Which arm trains faster at which bandwidth? One command measures, resumes and prints the table.

    python -m experiments.iteration_time              everything that is not recorded yet (hours), then the table
    python -m experiments.iteration_time --list       the cells, what is recorded, how long the rest may take
    python -m experiments.iteration_time --cells 'nano-r2-*'
    python -m experiments.iteration_time --quick      two small cells, under two minutes, rows in outputs/

Cells that are recorded with the same settings are skipped; an interrupted cell is measured again.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.iteration_time.closed_form import estimate_cell_s
from experiments.iteration_time.plan import Cell, compose_config, load_plan, select_cells, shorten
from experiments.iteration_time.progress import PlanProgress
from experiments.iteration_time.record import ROWS_DIR, is_recorded, record_cell
from experiments.iteration_time.table import make_console, report
from experiments.iteration_time.worker import run_cell
from tagc.config import Config, NetworkConfig
from tagc.errors import UserError
from tagc.host.device import resolve_device
from tagc.host.pipe import closed_pipe_ends_quietly
from tagc.launch import RankFailure, RunInterrupted, launch
from tagc.network import open_network
from tagc.record.manifest import describe_git

WORK_DIR = Path("outputs/iteration_time")
#: what this experiment writes into the repository: no change of the code that is measured
WRITTEN = tuple(f"experiments/iteration_time/{name}" for name in ("rows", "table.md", "table.csv", "crossover.csv"))
NETWORKS = ("auto", "namespaces", "paced")
QUICK_CELLS = ("nano-r2-fp32-reshard-200mbps", "nano-r2-fp32-reshard-1gbps")


def resolve_network(name: str) -> str:
    """What ``auto`` means on this machine: it decides which arms there are."""
    if name != "auto":
        return name
    config = Config(network=NetworkConfig(name=name))
    with open_network(config, resolve_device("auto", config.cluster.ranks)) as (resolved, _):
        return resolved.network.name


def find_open_cells(cells: list[Cell], rows_dir: Path) -> list[Cell]:
    """Those that are not recorded with their present settings."""
    return [cell for cell in cells if not is_recorded(rows_dir, cell)]


def measure_cell(cell: Cell, rows_dir: Path, work_dir: Path) -> None:
    """Launch the cell's ranks and record what they measured."""
    configs = {arm: compose_config(cell, arm) for arm in cell.arms}
    run_dir = work_dir / cell.network / cell.key
    git = describe_git(ignored=WRITTEN)  # before anything else is recorded
    summary = launch(configs["fsdp"], run_dir, partial(run_cell, cell, configs))
    record_cell(rows_dir, cell, run_dir, summary | git)


def measure_plan(cells: list[Cell], rows_dir: Path, work_dir: Path, console: Console) -> int:
    """Measure cell after cell; returns how many failed. A failure does not stop the others, an interrupt does."""
    failed = 0
    with PlanProgress(cells, console) as progress:
        for cell in cells:
            with progress.follow(cell, work_dir / cell.network / cell.key / "metrics.jsonl"):
                try:
                    measure_cell(cell, rows_dir, work_dir)
                except (UserError, RankFailure) as error:
                    failed += 1
                    progress.say(f"{cell.key} failed: {error}")
    return failed


def list_cells(cells: list[Cell], rows_dir: Path, console: Console) -> None:
    """What there is, what is recorded, and how long the rest may take."""
    table = Table("cell", "arms", "steps per arm", "minutes, estimated", "recorded")
    open_cells = find_open_cells(cells, rows_dir)
    for cell in cells:
        minutes = f"{estimate_cell_s(cell) / 60:.0f}"
        table.add_row(cell.key, str(len(cell.arms)), str(cell.steps), minutes, "" if cell in open_cells else "yes")
    console.print(table)
    hours = sum(map(estimate_cell_s, open_cells)) / 3600
    console.print(f"{len(open_cells)} of {len(cells)} cells to measure, about {hours:.1f} h")


def main() -> int:
    """Parse, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=[], help="cell names, * stands for anything")
    parser.add_argument(
        "--network", default="auto", choices=NETWORKS, help="auto: namespaces where they work, else paced"
    )
    parser.add_argument("--rows", type=Path, default=ROWS_DIR, help="where the rows are recorded")
    parser.add_argument("--quick", action="store_true", help="two small cells, under two minutes")
    parser.add_argument("--list", action="store_true", help="show the cells and measure nothing")
    options = parser.parse_args()
    console = make_console()
    rows_dir, cells = options.rows, load_plan(resolve_network(options.network))
    if options.quick:
        rows_dir = WORK_DIR / "quick" if rows_dir == ROWS_DIR else rows_dir
        cells = [shorten(cell) for cell in select_cells(cells, QUICK_CELLS)]
    cells = select_cells(cells, options.cells)
    if options.list:
        list_cells(cells, rows_dir, console)
        return 0
    failed = measure_plan(find_open_cells(cells, rows_dir), rows_dir, WORK_DIR, console)
    report(rows_dir, rows_dir.parent if rows_dir == ROWS_DIR else rows_dir, console)
    return 1 if failed else 0


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        try:
            sys.exit(main())
        except (KeyboardInterrupt, RunInterrupted):
            sys.exit("interrupted; the same command goes on with the cell that was being measured")
