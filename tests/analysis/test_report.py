"""The report is the same bytes from the same rows, stands alone, and what is committed is current."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis import results
from analysis.arms import STYLES
from analysis.page import run_figures
from analysis.page.cell_tables import write_cell_tables
from analysis.records.load import load_recorded
from analysis.report import mark_code, write_report
from tagc.config import COMPRESSORS
from tagc.errors import UserError
from tests.analysis.conftest import write_run

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "experiments" / "iteration_time"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BARE = [f"{kind}_wire_bytes" for kind in ("value", "index", "return", "grad", "param")] + ["wire_bytes"]
PROBE = """<script>
addEventListener("load", () => {
  const page = document.documentElement;
  const found = {images: [...document.images].map(image => image.naturalWidth),
                 overflow: page.scrollWidth - page.clientWidth,
                 tables: document.querySelectorAll("table.sheet").length};
  page.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
});
</script></body>"""


@pytest.fixture(scope="module")
def folders(study, tmp_path_factory) -> list[Path]:
    """A study, one recorded cell, and what is modelled: every part of the page in few figures."""
    cell = tmp_path_factory.mktemp("cells")
    for suffix in (".csv", ".json"):
        shutil.copy(EXPERIMENT / "rows" / "namespaces" / f"nano-r2-fp32-reshard-200mbps{suffix}", cell)
    return [study, cell, ROOT / "experiments" / "cost_model"]


@pytest.fixture(scope="module")
def report(folders, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report(load_recorded(folders), out)
    return out


def test_the_command_gives_the_same_bytes_in_another_process(folders, report, tmp_path):
    command = [sys.executable, "-m", "analysis.report", *map(str, folders), "-o", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    files = sorted(path.relative_to(report) for path in report.rglob("*.*"))
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    assert [file for file in files if (report / file).read_bytes() != (tmp_path / file).read_bytes()] == []
    assert {path.suffix for path in files} == {".html", ".csv", ".md", ".tex", ".svg", ".pdf", ".png"}


def test_the_page_says_what_was_run_and_stands_alone(report):
    page = (report / "index.html").read_text()
    for expected in (
        "What was run",
        "Verdicts",
        "Iteration time",
        "Loss",
        "Traffic",
        "modelled",
        "AMD EPYC",
        "66bcc55",
    ):
        assert expected in page
    assert not re.search(r'(src|href)="(?!#|data:)', page) and "<script" not in page
    assert page.count("<img") == len(list((report / "figures").glob("*.svg")))


@pytest.mark.skipif(BROWSER is None, reason="no chromium on the path (Debian: apt-get install chromium)")
def test_a_browser_shows_every_figure_without_errors_or_overflow(report, tmp_path):
    page = tmp_path / "probed.html"
    page.write_text((report / "index.html").read_text().replace("</body>", PROBE))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=800,1000", "--enable-logging=stderr"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    match = re.search(r"<pre>(.*)</pre>", done.stdout)
    assert match, done.stderr[-2000:]
    found = json.loads(html.unescape(match[1]))
    assert "CONSOLE" not in done.stderr
    assert len(found["images"]) == len(list((report / "figures").glob("*.svg"))) and min(found["images"]) > 0
    assert found["overflow"] <= 0 and found["tables"] >= 10


def test_the_committed_tables_of_cells_are_current(tmp_path):
    write_cell_tables(EXPERIMENT / "rows", tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (EXPERIMENT / path.name).read_text(), f"{path.name} is not current: make report"


def test_runs_that_hold_little_still_make_a_page(tmp_path):
    """One that diverged before its first validation, one without bytes, one that did not end."""
    write_run(tmp_path / "runs" / "short", "bf16", steps=3)
    for name, change in (("diverged", {"train_loss": None, "val_loss": None}), ("bare", dict.fromkeys(BARE))):
        path = write_run(tmp_path / "runs" / name, "fsdp" if name == "bare" else "tagc2") / "metrics.jsonl"
        rows = [json.loads(line) | change for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(load_recorded([tmp_path / "runs"]), tmp_path).read_text()
    assert "interrupted after 3 of 20 steps: in no comparison" in page
    assert "no number: it diverged or was never validated: tagc2" in page


def test_a_panel_says_where_nothing_is_recorded_and_ticks_have_no_offset(tmp_path):
    """18.7: 100 % was `0.010` under `+9.999e1`, and a panel without a curve was empty."""
    frame = pd.DataFrame({"arm": "tagc2", "step": [1, 2], "achieved_sparsity": [0.8, 0.81]})
    frame = frame.assign(union_density=math.nan, peeled_frac=[0.99990, 0.99991])
    figure = run_figures.draw_shares(frame, "tiny", 1).figure
    figure.draw_without_rendering()
    curves, empty, peeled = figure.axes
    assert [text.get_text() for text in empty.texts] == ["nothing recorded"] and not curves.texts + peeled.texts
    assert peeled.yaxis.get_offset_text().get_text() == ""
    assert peeled.get_yticklabels()[0].get_text().startswith("99.")


def test_notes_show_code_and_escape_the_rest(report):
    page = (report / "index.html").read_text()
    assert "against <code>fsdp</code> of the same seed" in page and "`" not in re.sub(
        "<table.*?</table>", "", page, flags=re.S
    )
    assert mark_code("a < `b`") == "a &lt; <code>b</code>"


def test_one_damaged_run_is_left_out_and_told_on_the_page_and_by_the_exit_code(tmp_path):
    for name in ("whole", "broken"):
        write_run(tmp_path / "runs" / name, "fsdp")
    (tmp_path / "runs" / "broken" / "manifest.json").write_text("{torn")
    command = [sys.executable, "-m", "analysis.report", str(tmp_path / "runs"), "-o", str(tmp_path / "page")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "error: broken is left out" in done.stderr and "Traceback" not in done.stderr
    rows = (tmp_path / "page" / "tables" / "notices.csv").read_text()
    assert re.search(r"broken,.*DAMAGED, in nothing below: .*manifest\.json", rows)
    assert "whole,fsdp" in (tmp_path / "page" / "tables" / "runs.csv").read_text()
    with pytest.raises(UserError, match=r"manifest\.json"):  # committed tables are made of all rows or not at all
        load_recorded([tmp_path / "runs"])


def test_the_results_show_the_losses_of_a_study(study, write_run, tmp_path):
    for seed in range(2):
        write_run(tmp_path / str(seed), "tagc2", seed, compressor__sparsity=0.9)
    for seed in range(3):
        for arm in ("fsdp", "tagc2"):
            write_run(tmp_path / f"slow-{arm}-{seed}", arm, seed, bandwidth__rate_mbps=10.0)
        write_run(tmp_path / f"long-{seed}", "tagc2", seed, steps=40, trainer__max_steps=40)
    text = results.make_results(load_recorded([study, tmp_path]))
    assert "| `fsdp` | 4.210 (sd 0.24%, n = 3) |" in text
    assert "| `tagc2` | +0.50% (+0.50% to +0.50%, n = 3) |" in text
    assert re.search(r"20 steps; n = 2\): `tagc2\s+sparsity=0.9` \+0.50%", text)
    assert re.search(r"\| `tagc2` \| 3 \| \+\d.*% .*\| > 100 \|", text)  # sooner than fsdp at both links
    (verdict,) = re.findall(r"at most 1 % more loss at equal steps \| tagc2 \| (\w+) \|", text)
    assert verdict == "reproduced"


def test_every_compressor_has_a_style_of_its_own():
    assert set(COMPRESSORS) <= set(STYLES)
    assert len({(style.marker, style.line) for style in STYLES.values()}) == len(STYLES)  # without colour
    assert len({style.colour for style in STYLES.values()}) == len(STYLES)
