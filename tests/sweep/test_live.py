"""The live table of a sweep: what it says of the folders, and what of the runs' output it lets through."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tagc.config import Config
from tagc.sweep.identity import Point
from tagc.sweep.live import StateTable, live_table
from tagc.sweep.states import record_job

ROOT = Path(__file__).parents[2]


def make_points(sweep_dir: Path, count: int) -> list[Point]:
    """Points that differ in their seed; none has begun."""
    overrides = [("trainer.max_steps=60", f"seed={seed}") for seed in range(count)]
    config = Config()
    config.trainer.max_steps = 60
    return [Point(number, words, config, sweep_dir / f"p{number}") for number, words in enumerate(overrides)]


def write_row(run_dir: Path, **row: object) -> None:
    """A row before it, the row, and the torn beginning of one more."""
    rows = [json.dumps({"step": 1}), json.dumps(row), '{"step": 9']
    (run_dir / "metrics.jsonl").write_text("\n".join(rows))


def render(table: StateTable) -> list[str]:
    """The table's lines."""
    console = table._console
    console.file = io.StringIO()
    console.print(table.render())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_every_state_and_how_far_a_point_is(tmp_path: Path) -> None:
    points = make_points(tmp_path, 5)
    for number, status in ((0, "done"), (1, "failed"), (2, "interrupted")):
        points[number].run_dir.mkdir()
        summary = {"status": status, "steps": 60, "train_loss": 4.25, "val_loss": 4.5, "iteration_ms_median": 87.0}
        (points[number].run_dir / "summary.json").write_text(json.dumps(summary))
    write_row(points[2].run_dir, step=30, train_loss=None)
    table = StateTable(points, tmp_path, Console(width=100, height=30))
    with record_job(points[3].run_dir, {}):
        write_row(points[3].run_dir, step=12, train_loss=5.75, iteration_ms=410.2)
        lines = render(table)
    assert "1 pending, 1 running, 1 done, 1 failed, 1 interrupted" in lines[0]
    told = {line.split()[0]: line.split()[1:] for line in lines[2:] if line and line.split()[0].isdigit()}
    assert told == {
        "0": ["done", "60/60", "4.250", "4.500", "87", "seed=0"],
        "1": ["failed", "seed=1"],
        "2": ["interrupted", "30/60", "seed=2"],
        "3": ["running", "12/60", "5.750", "410", "seed=3"],
        "4": ["pending", "seed=4"],
    }


def test_a_low_terminal_shows_what_runs_or_failed_before_what_is_done(tmp_path: Path) -> None:
    points = make_points(tmp_path, 40)
    for point in points[:30]:
        point.run_dir.mkdir()
        status = "failed" if point.number == 29 else "done"
        (point.run_dir / "summary.json").write_text(json.dumps({"status": status}))
    table = StateTable(points, tmp_path, Console(width=60, height=14))
    with record_job(points[39].run_dir, {}):
        lines = render(table)
    shown = [line.split()[0] for line in lines[2:] if line and line.split()[0].isdigit()]
    assert shown == ["29", "30", "31", "32", "33", "39"] and "and 34 more" in "".join(lines)
    assert max(map(len, lines)) <= 60 and len(lines) <= 14


def test_without_a_terminal_nothing_changes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with live_table(make_points(tmp_path, 1), tmp_path) as is_shown:
        os.system("echo said by a rank")
    assert not is_shown and capfd.readouterr().out == "said by a rank\n"


def test_on_a_terminal_ranks_are_quiet_but_for_warnings(tmp_path: Path) -> None:
    script = f"""
import logging, os, sys, time
from multiprocessing import resource_tracker
from pathlib import Path
from tagc.record import close_logging, setup_logging
from tagc.sweep.live import live_table
from tests.sweep.test_live import make_points
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
with live_table(make_points(Path({str(tmp_path)!r}), 3), Path("sweep")) as is_shown:
    assert is_shown
    logger = setup_logging(Path({str(tmp_path)!r}), 0)  # as a rank does
    logger.info("step 10/60")
    logger.warning("a bucket went dense")
    close_logging()
    resource_tracker.ensure_running()
    os.system("echo '[rank 1] [bold] lost' >&2; (sleep 0.5; echo too late) &")
    time.sleep(0.2)
    logging.getLogger("launcher").info("said by the sweep")
print("as before", flush=True)
time.sleep(1)
"""
    terminal, inside = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=inside, stderr=inside) as process:
        os.close(inside)
        said, end_s = b"", time.monotonic() + 60
        while time.monotonic() < end_s:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # all that had it open have ended
                break
    os.close(terminal)
    assert process.returncode == 0, said
    for part in ("pending", "seed=2", "warning: a bucket", "[rank 1] [bold] lost", "as before", "too late"):
        assert part.encode() in said, said
    assert said.count(b"said by the sweep") == 1 and b"step 10/60" not in said
