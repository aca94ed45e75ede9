"""Tables, figures and one page from recorded runs and rows.

    python -m analysis.report experiments -o report/          # what is committed here
    python -m analysis.report outputs/ multirun/ -o report/   # your own run folders

writes ``index.html`` (self-contained), and under ``tables/`` and ``figures/`` every table as CSV, Markdown and LaTeX
and every figure as PNG, PDF and SVG. Equal rows give equal bytes. What is damaged is left out: the page says so at its
top, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import base64
import math
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from analysis.numbers.cells import find_crossovers, summarise_cell
from analysis.numbers.losses import compare_losses
from analysis.numbers.run_times import SERIES, StepTimes, compare_at_equal_time, list_step_times, own_step_ms
from analysis.numbers.schedules import compare_whole_schedules
from analysis.page import figures, loss_tables, overview, run_figures, run_tables
from analysis.page.cell_tables import (
    make_agreement_sheet,
    make_crossover_sheet,
    make_memory_sheet,
    make_transport_sheet,
)
from analysis.page.claims import make_claims_sheet
from analysis.page.figures import Drawing
from analysis.page.sheet import Sheet
from analysis.records.cells import Cell
from analysis.records.identity import find_notices, group_runs, loss_setting, select_newest
from analysis.records.load import Recorded, Run, load_recorded
from tagc.host.files import write_text_atomic
from tagc.host.pipe import closed_pipe_ends_quietly

TEMPLATE = Path(__file__).parent / "page" / "page.html.j2"
SCALING_RATE_GBPS = 10


@dataclass
class Section:
    """A part of the page."""

    title: str
    sheets: list[Sheet] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return self.title.lower().replace(" ", "-")


def build_sections(recorded: Recorded) -> list[Section]:
    """The whole report, empty parts left out."""
    tables = [summarise_cell(cell) for cell in recorded.cells]
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    sections = [
        Section(
            "What was run",
            [run_tables.make_notice_sheet(find_notices(recorded)), run_tables.make_source_sheet(recorded)],
        ),
        Section("Verdicts", [make_claims_sheet(table, compare_losses(recorded.runs))]),
    ]
    if len(table):
        sections.append(_build_time_section(recorded, table))
    if recorded.runs:
        sections += _build_run_sections(recorded)
    if len(recorded.modelled):
        sections.append(_build_modelled_section(recorded))
    for section in sections:
        section.sheets = [sheet for sheet in section.sheets if sheet.lines]
    return [section for section in sections if section.sheets or section.drawings]


def _build_time_section(recorded: Recorded, table: pd.DataFrame) -> Section:
    cells = recorded.cells
    sheets = [
        overview.make_iteration_sheet(cells, table),
        overview.make_gradient_sheet(table),
        make_crossover_sheet(find_crossovers(table)),
        make_transport_sheet(cells),
        make_agreement_sheet(table),
        make_memory_sheet(cells),
    ]
    drawings = []
    for (network, setting), rows in table.groupby(["network", "setting"], sort=False):
        drawings.append(figures.draw_iteration_bars(rows, network, setting))
        if rows["rate_mbps"].nunique() > 1:
            drawings.append(figures.draw_saving_by_rate(rows, network, setting))
        if rows["rate_mbps"].notna().any():
            drawings.append(figures.draw_gradient_bars(rows, network, setting))
    return Section("Iteration time", sheets, drawings)


def _build_run_sections(recorded: Recorded) -> list[Section]:
    runs, losses = recorded.runs, compare_losses(recorded.runs)
    timed, whole = compare_at_equal_time(runs, recorded.cells), compare_whole_schedules(runs, recorded.cells)
    sheets = [
        loss_tables.make_loss_sheet(losses),
        loss_tables.make_equal_time_sheet(timed),
        loss_tables.make_equal_loss_sheet(timed),
        loss_tables.make_schedule_sheet(whole),
    ]
    loss = Section("Loss", sheets)
    traffic = Section("Traffic", [run_tables.make_bytes_sheet(runs), run_tables.make_shares_sheet(runs)])
    numbers = traffic.sheets[0].numbers
    assert numbers is not None
    groups = group_runs([run for run in runs if run.is_done], loss_setting)
    for index, (setting, members) in enumerate(groups.items(), start=1):
        frame, times = _make_curves(members, recorded.cells)
        mine = losses[losses["setting"] == setting]
        if mine["degradation_frac"].where(mine["arm"] != "fsdp").notna().any():
            loss.drawings.append(run_figures.draw_degradation(mine, index))
        loss.drawings.append(run_figures.draw_curves(frame, setting, times, index))
        traffic.drawings.append(run_figures.draw_bytes(numbers[numbers["setting"] == setting], setting, index))
        if frame[list(run_figures.SHARES)].notna().any(axis=None):
            traffic.drawings.append(run_figures.draw_shares(frame, setting, index))
    for table, kind in ((timed, "equal_loss"), (whole, "equal_loss_whole")):
        series = [rows for _, rows in table.groupby(SERIES, sort=False) if rows["rate_mbps"].nunique() > 1]
        loss.drawings += [run_figures.draw_equal_loss(rows, kind, index) for index, rows in enumerate(series, start=1)]
    sheets = [run_tables.make_setting_sheet(runs), run_tables.make_run_sheet(runs)]
    return [loss, traffic, Section("Runs", [*sheets, run_tables.make_run_time_sheet(runs)])]


def _make_curves(runs: Sequence[Run], cells: Sequence[Cell]) -> tuple[pd.DataFrame, str]:
    """arm, seed, step, time_s, val_loss and shares of the newest run of every arm and seed; where the times come from.

    Times are those of the slowest link at which most arms were timed, else the runs' own.
    """
    newest = select_newest(runs)
    own = StepTimes("their own", "", "", math.nan, newest, {key: own_step_ms(run) for key, run in newest.items()})
    timed = max(list_step_times(runs, cells), key=lambda each: (len(each.runs), -each.rate_mbps), default=own)
    frames = []
    for (arm, seed), run in newest.items():
        frame = run.rows.reindex(columns=["step", "val_loss", *run_figures.SHARES]).astype(float)
        time_s = frame["step"] * timed.step_ms.get((arm, seed), math.nan) / 1e3
        frames.append(frame.assign(arm=arm, seed=seed, time_s=time_s))
    place = "" if timed is own else f" at {timed.rate_mbps:.4g} Mbit/s ({timed.network})"
    return pd.concat(frames, ignore_index=True), f"{timed.times}{place}"


def _build_modelled_section(recorded: Recorded) -> Section:
    sheets = [overview.make_scaling_sheet(recorded.modelled)]
    if len(recorded.modelled_crossovers):
        sheets.append(overview.make_modelled_crossover_sheet(recorded.modelled_crossovers))
    workloads = recorded.modelled["workload"].unique()
    drawings = [figures.draw_scaling(recorded.modelled, workload, SCALING_RATE_GBPS) for workload in workloads]
    return Section("Beyond this machine: modelled", sheets, drawings)


def write_report(recorded: Recorded, out_dir: Path) -> Path:
    """Write everything; returns the page. Errors: ``UserError`` when the folder cannot be written."""
    sections = build_sections(recorded)
    tables_dir, figures_dir = out_dir / "tables", out_dir / "figures"
    for folder in (tables_dir, figures_dir):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier report: nothing stale stays
        folder.mkdir(parents=True)
    for sheet in (sheet for section in sections for sheet in section.sheets):
        write_text_atomic(tables_dir / f"{sheet.name}.csv", sheet.to_csv())
        write_text_atomic(tables_dir / f"{sheet.name}.md", sheet.to_markdown())
        write_text_atomic(tables_dir / f"{sheet.name}.tex", sheet.to_latex())
    images = {drawing.name: _encode(drawing.save(figures_dir)) for section in sections for drawing in section.drawings}
    write_text_atomic(out_dir / "index.html", render_page(sections, images))
    return out_dir / "index.html"


def _encode(path: Path) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def render_page(sections: Sequence[Section], images: dict[str, str]) -> str:
    """The page; images: data URIs by name of the figure."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["mark_code"] = mark_code
    template: Any = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(sections=sections, images=images) + "\n"


def mark_code(text: str) -> Markup:
    """Escaped text for the page, with what stands between backticks as code.

    >>> mark_code("less than `fsdp`")
    Markup('less than <code>fsdp</code>')
    """
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def main() -> int:
    """Parse, load, write; returns the exit code: 1 if something was damaged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that hold run folders or recorded rows")
    parser.add_argument("-o", "--out", type=Path, default=Path("report"), help="where the report goes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    recorded = load_recorded(options.folders, skip_damaged=True)
    sys.stdout.write(f"{write_report(recorded, options.out)}\n")
    for where, why in recorded.damaged:
        sys.stderr.write(f"error: {where} is left out: {why}\n")
    return int(bool(recorded.damaged))


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
