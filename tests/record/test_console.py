from __future__ import annotations

import io
import logging
import re
import resource
from pathlib import Path

import pytest
from rich.console import Console

from tagc.record import console as console_module
from tagc.record import print_table, setup_logging, summarise
from tagc.record.columns import format_step_time
from tagc.record.progress import StepDisplay

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 110) -> io.StringIO:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    monkeypatch.setattr(console_module, "_console", console)
    return screen


def drive(display: StepDisplay, rows: list[dict]) -> None:
    for row in rows:
        display.update(row)
    display.close()


def test_lines_in_a_pipe(config, make_row, tmp_path: Path, capsys) -> None:
    setup_logging(tmp_path, rank=0)
    display = StepDisplay(10, 4, console_module.get_console())
    rows = [make_row(step) for step in range(1, 11)]
    rows[5]["val_loss"] = 7.25
    drive(display, rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "6/10", "8/10", "10/10"]
    assert lines[0] == "step 1/10  loss 7.900  1.00 s/step  8.1 MB/step"
    assert lines[2] == "step 6/10  loss 7.400  val loss 7.250  1.00 s/step  8.1 MB/step"
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert len(logged) == 5
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO step 1/10  loss", logged[0])


def test_a_run_that_stops_early_shows_its_last_step(make_row, tmp_path: Path, capsys) -> None:
    setup_logging(tmp_path, rank=0)
    drive(StepDisplay(100, 50, console_module.get_console()), [make_row(step) for step in range(1, 8)])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/100", "7/100"]


def test_a_row_without_numbers_or_with_a_diverged_loss(tmp_path: Path, capsys) -> None:
    setup_logging(tmp_path, rank=0)
    rows = [{"step": 1}, {"step": 2, "train_loss": None, "iteration_ms": 87.4}]
    drive(StepDisplay(2, 10, console_module.get_console()), rows)
    assert capsys.readouterr().out.splitlines() == ["step 1/2", "step 2/2  loss not finite  87 ms/step"]


def test_the_step_time_is_the_median_since_the_line_before(make_row, tmp_path: Path, capsys) -> None:
    setup_logging(tmp_path, rank=0)
    times = [50_000.0, 2000.0, 3000.0, 90_000.0, 3000.0]
    rows = [make_row(i + 1, iteration_ms=t) for i, t in enumerate(times)]
    drive(StepDisplay(5, 5, console_module.get_console()), rows)
    assert "3.00 s/step" in capsys.readouterr().out.splitlines()[1]
    assert (format_step_time(999), format_step_time(1000)) == ("999 ms/step", "1.00 s/step")


def test_a_bar_on_a_terminal_is_not_torn_by_log_lines(make_row, tmp_path: Path, monkeypatch) -> None:
    screen = make_terminal(monkeypatch)
    logger = setup_logging(tmp_path, rank=0)
    display = StepDisplay(10, 1, console_module.get_console())
    for step in range(1, 11):
        display.update(make_row(step))
        if step == 5:
            logger.info("bucket [3] goes dense")
    display.close()
    # Each redraw starts with a carriage return; what is on a line in the end is what followed the last one.
    lines = [line.split("\r")[-1].rstrip() for line in ESCAPES.sub("", screen.getvalue()).split("\n")]
    assert "bucket [3] goes dense" in lines
    bar = next(line for line in lines if "10/10" in line)
    for part in ("step", "loss 7.000", "1.00 s/step", "8.1 MB/step", "ETA"):
        assert part in bar
    assert not any("step 3/10" in line for line in lines)  # the bar stands for the lines here
    assert (tmp_path / "log.txt").read_text().count(" step ") == 10


def test_other_ranks_warn_on_stderr_and_write_no_file(tmp_path: Path, capsys) -> None:
    logger = setup_logging(tmp_path / "run", rank=3)
    logger.info("quiet")
    logger.warning("late")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "warning: [rank 3] late\n"
    assert not (tmp_path / "run").exists()


def test_setting_up_twice_writes_every_line_once(tmp_path: Path, capsys) -> None:
    setup_logging(tmp_path, rank=0)
    setup_logging(tmp_path, rank=0).warning("once")
    assert capsys.readouterr().out == "warning: once\n"
    assert (tmp_path / "log.txt").read_text().count("once") == 1


def test_a_root_logger_that_prints_does_not_double_lines(tmp_path: Path, capsys) -> None:
    import sys

    root_handler = logging.StreamHandler(sys.stdout)  # as Hydra's job logging does
    logging.getLogger().addHandler(root_handler)
    try:
        setup_logging(tmp_path, rank=0).info("once")
    finally:
        logging.getLogger().removeHandler(root_handler)
    assert capsys.readouterr().out == "once\n"


def test_a_full_disk_costs_the_log_file_no_traceback(tmp_path: Path, capsys) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    logger = setup_logging(tmp_path, rank=0)
    logger.info("first")
    logger.info("second")
    captured = capsys.readouterr()
    assert captured.out == "first\nsecond\n"
    assert "Traceback" not in captured.err


def test_the_log_file_goes_on_when_the_disk_has_room_again(tmp_path: Path) -> None:
    logger = setup_logging(tmp_path, rank=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    logger.error("no checkpoint was saved")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "log.txt").read_text() == ""
    logger.info("saved again")
    assert [line.split(" ", 3)[3] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "no checkpoint was saved",
        "saved again",
    ]


@pytest.fixture
def summary(config, make_row, tmp_path: Path) -> dict:
    row = {"value_wire_bytes": 900_000, "index_wire_bytes": 300_000, "return_wire_bytes": 0, "param_wire_bytes": 6.9e6}
    shares = {"achieved_sparsity": 0.8, "union_density": 0.361, "peeled_frac": 0.999, "val_loss": 7.123}
    rows = [make_row(step, **row, **shares) for step in range(1, 11)]
    return {"status": "done", **summarise(rows, config), "run_dir": str(tmp_path / ("long" * 30))}


def print_in_pipe(summaries: list[dict]) -> str:
    screen = io.StringIO()
    print_table(summaries, Console(file=screen, width=100))
    return screen.getvalue()


def test_the_table_of_one_run(summary) -> None:
    text = print_in_pipe([summary])
    found = dict(re.findall(r"^ +(\S.*?) {2,}(\S.*?) *$", text, flags=re.MULTILINE))
    assert found["iteration ms, median (p20-p80)"] == "1000 (1000-1000)"
    assert found["gradient bytes per step"] == "1.2 MB"
    assert found["values"] == "900.0 kB"
    assert found["index"] == "300.0 kB"
    assert found["parameter bytes per step"] == "6.9 MB"
    assert found["all bytes per step"] == "8.1 MB"
    assert found["validation loss"] == "7.123"
    assert (found["sparsity"], found["union density"], found["peeled"]) == ("80.0%", "36.1%", "99.9%")
    assert f"run folder: {summary['run_dir']}\n" in text  # in one piece though longer than the line


@pytest.mark.parametrize(
    ("dilation", "shown"),
    [(1.0, "10,000 Mbit/s, paced"), (160.0, "62.5 Mbit/s (time dilation 160), paced"), (None, "not capped yet, paced")],
)
def test_the_table_shows_the_rate_in_force(summary, dilation: float | None, shown: str) -> None:
    text = print_in_pipe([{**summary, "bandwidth": "10gbps", "rate_mbps": 10_000.0, "time_dilation": dilation}])
    assert f"10gbps: {shown}" in text


def test_the_table_of_a_run_that_measured_nothing(config) -> None:
    text = print_in_pipe([{"status": "failed", "error": "UserError: [x] bad", **summarise([], config)}])
    assert "UserError: [x] bad" in text
    assert re.search(r"all bytes per step +-", text)


def test_the_table_of_a_sweep_fits_a_pipe(summary) -> None:
    slow = {"iteration_ms_median": 12345.0, "iteration_ms_p20": 12000.0, "iteration_ms_p80": 13000.0}
    other = {**summary, **slow, "compressor": "fsdp", "bandwidth": "100mbps", "peeled_frac": None, "seed": 1}
    table, folders = print_in_pipe([summary, other]).split("run folders:")
    assert "ranks 2, model nano" in table
    first, second = (line for line in table.splitlines() if re.match(r" +[01] ", line))
    assert " ".join(first.split()) == "0 tagc2 unlimited 0 7.000 7.123 1000 1000-1000 1.20 8.10 80.0% 36.1% 99.9%"
    assert second.split()[:8] == ["1", "fsdp", "100mbps", "1", "7.000", "7.123", "12345", "12000-13000"]
    assert max(map(len, table.splitlines())) <= 100
    assert folders.count(summary["run_dir"]) == 2


def test_a_sweep_with_a_failed_run_has_a_status_column(summary) -> None:
    assert "status" not in print_in_pipe([summary, summary])
    assert "failed" in print_in_pipe([summary, {**summary, "status": "failed"}])


def test_settings_that_do_not_fit_stand_below_the_table(summary) -> None:
    other = {**summary, "compressor": "fsdp", "bandwidth": "100mbps", "ranks": 4, "seed": 1, "model": "gpt2_medium"}
    table, folders = print_in_pipe([summary, other]).split("run folders:")
    assert max(map(len, table.splitlines())) <= 100
    first = next(line for line in table.splitlines() if line.startswith(" 0"))
    assert first.split()[:3] == ["0", "tagc2", "unlimited"]
    assert f"{summary['run_dir']} seed=" in folders and "model=gpt2_medium" in folders
    for key in ("ranks", "seed"):  # told once, above or below
        assert (key in table) != (f"{key}=" in folders)


def test_no_run_no_table() -> None:
    assert print_in_pipe([]) == ""
