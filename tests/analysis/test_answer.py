"""What the front page says follows from the rows, and what is committed is current."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis import results
from analysis.page import answer
from analysis.records.load import load_recorded
from tagc.errors import UserError

ROOT = Path(__file__).parents[2]
RATES = (100.0, 1000.0, 10_000.0)
#: (saved share at each rate, half the width of its interval)
SAVED = {"noop": (0.5, 0.4, 0.3), "fsdp": (0, 0, 0), "bf16": (0.1, 0.2, 0.001), "tagc": (0.3, -0.1, -0.2)}


@pytest.fixture
def table() -> pd.DataFrame:
    """Four methods at three links, as ``summarise_cell`` gives them."""
    lines = []
    for rate, saved in ((rate, {arm: each[i] for arm, each in SAVED.items()}) for i, rate in enumerate(RATES)):
        for arm, share in saved.items():
            line = {"network": "paced", "machine": "box", "setting": "tiny", "cell": f"{rate}", "arm": arm}
            line |= {"rate_mbps": rate, "bytes_counted_by": "exchange", "blocks": 4, "iteration_ms": 1000 * (1 - share)}
            line |= {"saved_vs_fsdp_frac": share, "saved_vs_fsdp_frac_low": share - 0.01}
            line |= {"saved_vs_fsdp_frac_high": share + 0.01, "exposed_comm_ms": 1.0, "compute_ms": 10.0}
            line |= {f"saved_gradient_comm_frac{end}": 0.0 for end in ("", "_low", "_high")}
            line |= {"nominal_mbps": rate, "time_dilation": 1.0}
            line["saved_vs_bf16_frac"] = 1 - (1 - share) / (1 - saved["bf16"])
            lines.append(line)
    return pd.DataFrame(lines)


@pytest.fixture
def losses() -> pd.DataFrame:
    """Of two methods, one of which diverged in one seed."""
    shared = {"setting": "tiny, 2 ranks", "sparsity": 0.8, "degradation_frac_low": math.nan}
    shared |= {"degradation_frac_high": math.nan}
    costs = {"fsdp": (0.0, 2), "bf16": (math.nan, 2), "tagc": (0.013, 1)}
    return pd.DataFrame(
        [shared | {"arm": arm, "degradation_frac": cost, "pairs": n} for arm, (cost, n) in costs.items()]
    )


def test_the_winner_at_each_link_is_told(table):
    text = answer.tell_time(table)
    assert "at 100 Mbit/s `tagc` wins, with iterations 30% shorter" in text
    assert "at 1000 Mbit/s `bf16` wins, with iterations 20% shorter" in text
    assert "at 10000 Mbit/s no method is faster than `fsdp` beyond its 95 % interval" in text
    assert "`tagc` is faster than `fsdp` up to 562 Mbit/s" in text


def test_a_loss_is_told_with_its_seeds_and_a_diverged_one_is_not_a_number(table, losses):
    assert "`tagc` +1.3% (n = 1)." in answer.tell_loss(table, losses)
    assert "bf16" not in answer.tell_loss(table, losses)
    assert answer.tell_loss(table, losses[losses["arm"] == "fsdp"]) == ""


def test_the_table_has_a_line_per_method_and_at_most_five_columns(table, losses):
    sheet = answer.make_answer_sheet(table, losses)
    assert sheet.headers == ("compressor", "100 Mbit/s", "1000 Mbit/s", "10000 Mbit/s", "loss cost")
    assert sheet.lines[1] == ("`fsdp`", "1000 ms", "1000 ms", "1000 ms", "-")
    assert sheet.lines[3] == ("`tagc`", "+30.0%", "-10.0%", "-20.0%", "+1.30% (n = 1)")


def test_claims_are_counted_by_their_verdicts(table, losses):
    text = answer.tell_claims(table, losses)
    assert text == ("Claims: of the papers' 8 claims 0 reproduce; 2 reproduce in part, 6 could not be measured here.")


def test_what_is_committed_is_current():
    files = results.make_files(load_recorded([results.ROWS]))
    for path, content in files.items():
        assert path.read_bytes() == content, f"{path.name} is not current: make results"
    assert len(files[results.FIGURE]) < 100_000
    page = results.PAGE.read_text()
    with pytest.raises(UserError, match="once each"):
        results.replace_section(page.replace(results.END.format("results"), ""), "results", "text")


def test_without_a_capped_cell_there_is_no_answer(study):
    with pytest.raises(UserError, match="no cell with a capped link"):
        results.make_answer(load_recorded([study]))


def test_a_figure_does_not_follow_the_users_matplotlibrc(tmp_path):
    """17.16: `text.usetex` cost the whole page, `lines.linewidth` changed the figures of equal rows."""
    script = (
        "import sys; from pathlib import Path; import pandas as pd\n"
        "from analysis.page import figures\n"
        "line = {'network': 'n', 'setting': 's', 'arm': 'bf16', 'bytes_counted_by': 'exchange'}\n"
        "line |= {f'saved_vs_fsdp_frac{end}': 0.1 for end in ('', '_low', '_high')}\n"
        "table = pd.DataFrame([line | {'rate_mbps': rate} for rate in (10.0, 100.0)])\n"
        "figures.draw_saving_by_rate(table, 'n', 's').save(Path(sys.argv[1]))\n"
    )
    saved = {}
    for name, settings in (("plain", ""), ("own", "text.usetex: True\nlines.linewidth: 8\nfigure.facecolor: red\n")):
        out = tmp_path / name
        out.mkdir()
        (out / "matplotlibrc").write_text(settings)
        environment = os.environ | {"MATPLOTLIBRC": str(out / "matplotlibrc")}
        command = [sys.executable, "-c", script, str(out)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        saved[name] = {path.suffix: path.read_bytes() for path in out.glob("saving_*")}
    assert set(saved["plain"]) == {".png", ".pdf", ".svg"}
    assert saved["plain"] == saved["own"]
