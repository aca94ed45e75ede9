"""The answer in README.md, its figure, and the tables of docs/results.md: made from recorded rows, between markers.

python -m analysis.results            # rewrite them (make results)
python -m analysis.results --check    # exit code 1 if one is not current
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from pathlib import Path

import pandas as pd

from analysis.arms import sort_arms
from analysis.numbers.cells import BASELINES, find_crossovers, read_estimate, summarise_cell
from analysis.numbers.losses import compare_losses
from analysis.numbers.run_times import SERIES
from analysis.numbers.schedules import compare_whole_schedules
from analysis.page import answer
from analysis.page.answer import is_own_setting, pick_setting
from analysis.page.claims import make_claims_sheet
from analysis.page.loss_tables import format_degradation, make_schedule_sheet
from analysis.page.sheet import MISSING, Sheet, format_number, format_range
from analysis.records.load import Recorded, load_recorded
from tagc.errors import UserError
from tagc.host.files import write_text_atomic
from tagc.host.pipe import closed_pipe_ends_quietly

ROOT = Path(__file__).parents[1]
README, PAGE, FIGURE, ROWS = (
    ROOT / "README.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "answer.svg",
    ROOT / "experiments",
)
BEGIN = "<!-- {}: made by `make results` from experiments/, do not edit -->"
END = "<!-- /{} -->"
WIDTH = 120
BOUNDS = {"interpolated": "", "above": "over ", "below": "under "}  # a wrapped line must not begin with ">"


def make_time_sheet(table: pd.DataFrame) -> Sheet:
    """Arms by links of one setting: median time, and the share of the iteration of ``fsdp`` that is saved."""
    columns = table.sort_values("rate_mbps", na_position="last").drop_duplicates("cell")
    lines = []
    for arm in sort_arms(table["arm"]):
        mine = table[table["arm"] == arm].set_index("cell")
        shown = (_format_time(mine.loc[cell]) if cell in mine.index else MISSING for cell in columns["cell"])
        lines.append((f"`{arm}`", *shown))
    first = columns.iloc[0]
    rates = [format_number(rate, ".4g") for rate in columns["rate_mbps"]]
    headers = ("compressor", *("no cap" if rate == MISSING else f"{rate} Mbit/s" for rate in rates))
    note = (
        f"Milliseconds per step, {first['setting']} on {first['machine']} ({first['network']}, time as measured), and "
        f"how much shorter than `fsdp` with its 95 % interval; {format_range(table['steps'])} timed "
        f"steps in {format_range(table['blocks'])} blocks, arms in turn."
    )
    return Sheet("results_time", "Iteration time", note, headers, lines)


def _format_time(line: pd.Series) -> str:
    if line["arm"] == "fsdp":
        return f"{line['iteration_ms']:.0f}"
    saved = read_estimate(line, "saved_vs_fsdp_frac")
    return f"{line['iteration_ms']:.0f}, {saved.middle:+.1%} ({100 * saved.low:+.0f} to {100 * saved.high:+.0f})"


def describe_crossovers(table: pd.DataFrame) -> str:
    """One sentence per baseline: up to which link rate each arm was faster."""
    crossovers, sentences = find_crossovers(table), []
    for baseline in BASELINES:
        rows = crossovers[crossovers["baseline"] == baseline]
        shown = [f"`{row.arm}` {BOUNDS[row.bound]}{row.crossover_mbps:.0f}" for row in rows.itertuples()]
        if shown:
            sentences.append(f"Faster than `{baseline}` up to, in Mbit/s: {', '.join(shown)}.")
    return " ".join(sentences)


def make_degradation_sheet(losses: pd.DataFrame) -> Sheet:
    """The compressors' own settings by setting of model and training. losses: of ``compare_losses``."""
    headline = losses[is_own_setting(losses["arm"])]
    headline = headline[headline["setting"].isin(headline["setting"][headline["arm"] == "fsdp"])]
    settings = list(dict.fromkeys(headline["setting"]))
    lines = []
    for arm in sort_arms(headline["arm"]):
        mine = headline[headline["arm"] == arm].set_index("setting")
        shown = (_format_loss(mine.loc[setting]) if setting in mine.index else MISSING for setting in settings)
        lines.append((f"`{arm}`", *shown))
    note = (
        "Validation loss above that of `fsdp` with the same seed after the same steps: mean and 95 % interval over n "
        "seeds; for `fsdp` its loss, and how far its seeds lie apart (standard deviation)."
    )
    return Sheet("results_loss", "Loss", note, ("compressor", *settings), lines)


def _format_loss(line: pd.Series) -> str:
    if line["arm"] == "fsdp":
        noise = line["val_loss_sd"] / line["val_loss"]
        return f"{line['val_loss']:.3f} ({'' if pd.isna(noise) else f'sd {noise:.2%}, '}n = {line['seeds']})"
    return format_degradation(line, show_n=True)


def describe_variants(losses: pd.DataFrame) -> str:
    """The other settings of the compressors in the setting that has most of them, in one sentence."""
    is_variant = ~is_own_setting(losses["arm"]) & losses["degradation_frac"].notna()
    if not is_variant.any():
        return ""
    setting = losses[is_variant]["setting"].mode()[0]
    rows = losses[is_variant & (losses["setting"] == setting)]
    shown = [f"`{row.arm}` {row.degradation_frac:+.2%}" for row in rows.itertuples()]
    return f"Other settings ({setting}; n = {format_range(rows['pairs'])}): {', '.join(shown)}."


def make_sooner_sheet(whole: pd.DataFrame) -> Sheet:
    """The series with most links: time saved to the loss of ``fsdp``, and up to which rate against both baselines.

    whole: of ``compare_whole_schedules``, not empty.
    """
    links = whole.groupby(SERIES, sort=False)["rate_mbps"].nunique()
    series = dict(zip(SERIES, links.idxmax(), strict=True))
    sheet = make_schedule_sheet(whole[(whole[SERIES] == pd.Series(series)).all(axis=1)])
    arm, against, first = (sheet.headers.index(name) for name in ("arm", "against", "seeds"))
    ends = {(line[arm], line[against]): line[-1] for line in sheet.lines}
    saved = {line[arm]: line[first:-1] for line in sheet.lines if line[against] == "fsdp"}
    lines = [(f"`{name}`", *saved[name], *(ends.get((name, base), MISSING) for base in BASELINES)) for name in saved]
    note = (
        f"Time saved until the final loss of `fsdp`, every run to the end of its schedule ({series['setting']}; step "
        f"times of {series['times']}, {series['network']}), and the Mbit/s up to which any is saved against each "
        "baseline."
    )
    headers = ("compressor", *sheet.headers[first:-1], "than `fsdp` up to", "than `bf16` up to")
    return Sheet("results_sooner", "Time to equal loss", note, headers, lines)


def make_results(recorded: Recorded) -> str:
    """The section's text, markers excluded."""
    parts = []
    tables = [summarise_cell(cell) for cell in recorded.cells]
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    if len(table):
        setting = pick_setting(table)
        sheet = make_time_sheet(setting)
        parts += [sheet.note, sheet.to_markdown(level=0), describe_crossovers(setting)]
    losses, whole = compare_losses(recorded.runs), compare_whole_schedules(recorded.runs, recorded.cells)
    if len(losses):
        sheet = make_degradation_sheet(losses)
        parts += [sheet.note, sheet.to_markdown(level=0), describe_variants(losses)]
    whole = whole[is_own_setting(whole["arm"])]
    if len(whole):
        sheet = make_sooner_sheet(whole)
        parts += [sheet.note, sheet.to_markdown(level=0)]
    parts.append(make_claims_sheet(table, losses, show_places=False).to_markdown(level=0))
    return "\n\n".join(_wrap(part.strip()) for part in parts if part)


def _wrap(text: str) -> str:
    return text if text.startswith(("|", "![")) else textwrap.fill(text, WIDTH, break_on_hyphens=False)


def make_answer(recorded: Recorded) -> tuple[str, bytes]:
    """The front page's text, markers excluded, and its figure as SVG. Errors: ``UserError`` without capped cells."""
    tables = [summarise_cell(cell) for cell in recorded.cells]
    everything = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    table = answer.select_answer(everything) if len(everything) else everything
    if not len(table):
        raise UserError("no cell with a capped link is recorded: the front page has nothing to answer with")
    losses = compare_losses(recorded.runs)
    sheet, drawing = answer.make_answer_sheet(table, losses), answer.draw_answer(table)
    sentences = [answer.tell_time(table), answer.tell_loss(table, losses), answer.tell_claims(everything, losses)]
    image = f"![{drawing.caption}]({FIGURE.relative_to(ROOT)})"
    parts = [*filter(None, sentences), image, sheet.to_markdown(level=0).strip(), sheet.note]
    with tempfile.TemporaryDirectory() as folder:
        figure = drawing.save(Path(folder)).read_bytes()
    return "\n\n".join(map(_wrap, parts)), figure


def replace_section(page: str, name: str, text: str) -> str:
    """The page with this text between the markers of ``name``. Errors: ``UserError`` if a marker is missing."""
    begin, end = BEGIN.format(name), END.format(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise UserError(f"a page needs the lines\n{begin}\n{end}\nonce each, around what `make results` writes")
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def make_files(recorded: Recorded) -> dict[Path, bytes]:
    """What README.md, docs/results.md and docs/answer.svg should hold."""
    text, figure = make_answer(recorded)
    sections = {README: ("answer", text), PAGE: ("results", make_results(recorded))}
    pages = {path: replace_section(path.read_text(encoding="utf-8"), *each) for path, each in sections.items()}
    return {path: page.encode() for path, page in pages.items()} | {FIGURE: figure}


def main() -> int:
    """Rewrite or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not current")
    options = parser.parse_args()
    files = make_files(load_recorded([ROWS]))
    stale = [path for path, content in files.items() if not path.exists() or path.read_bytes() != content]
    for path in stale:
        name = path.relative_to(ROOT)
        sys.stdout.write(f"{name} is not current: make results\n" if options.check else f"{name}\n")
        if not options.check:
            write_text_atomic(path, files[path].decode())
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    with closed_pipe_ends_quietly():
        sys.exit(main())
