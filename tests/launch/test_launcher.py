"""Starting ranks: success, and every way in which a rank or the launcher can end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

import tagc.data
from tagc.config import Config
from tagc.errors import UserError
from tagc.launch import RankFailure, RunInterrupted, launch, stop_server
from tagc.launch.folder import read_outcome
from tests.launch import workers

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagc.data, "prepare", lambda config: f"prepared {config.name}", raising=False)


def _make_config(ranks: int = 2) -> Config:
    """The first failure is the last."""
    config = Config()
    config.cluster.ranks, config.cluster.max_restarts = ranks, 0
    return config


def _start(worker: str, run_dir: Path, *network: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.launch.start", worker, str(run_dir), *network]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(run_dir.parent)},  # what a killed launcher leaves behind
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for(paths: list[Path], timeout_s: float = 300) -> list[str]:
    """The files' texts, once all of them have one."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if all(path.exists() and path.read_text() for path in paths):
            return [path.read_text() for path in paths]
        time.sleep(0.05)
    raise TimeoutError(f"{[path.name for path in paths if not path.exists()]} did not appear in {timeout_s} s")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for_end(pids: list[int], timeout_s: float = 60) -> list[int]:
    """The processes among ``pids`` that still live after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while any(map(_lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if _lives(pid)]


def test_ranks_meet_and_the_summary_comes_back(tmp_path: Path) -> None:
    config = Config()
    config.cluster.threads_per_rank = 3
    environment = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run_dir = tmp_path / "new" / "run"
    summary = launch(config, run_dir, workers.sum_ranks)
    expected = {"status": "done", "total": 3.0, "data": "prepared pystdlib", "threads": 3}
    assert summary == {**expected, "run_dir": str(run_dir)}
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_ranks_of_every_launch_have_the_environment_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a fork server that an earlier launch started, or its successor, has another one."""
    names = ("TAGC_TEST_CHANGED", "TAGC_TEST_ADDED", "TAGC_TEST_REMOVED", "PYTHONPATH", "PYTHONSAFEPATH")
    monkeypatch.setenv("TAGC_TEST_CHANGED", "first")
    monkeypatch.setenv("TAGC_TEST_REMOVED", "first")
    stop_server()
    for number in range(3):
        environment = launch(Config(), tmp_path / str(number), workers.note_environment)["environment"]
        assert {name: environment.get(name) for name in names} == {name: os.environ.get(name) for name in names}
        monkeypatch.setenv("TAGC_TEST_CHANGED", f"after {number}")
        monkeypatch.setenv("TAGC_TEST_ADDED", "later")
        monkeypatch.delenv("TAGC_TEST_REMOVED", raising=False)
        if number == 1:
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            time.sleep(0.2)


def test_two_launches_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    runs = [_start("sum_ranks", tmp_path / name) for name in ("a", "b")]
    for run in runs:
        out, err = run.communicate(timeout=300)
        assert (run.returncode, out, err) == (0, "total=3.0\n", "")


def test_an_exception_is_told_once_with_its_rank_and_traceback(tmp_path: Path) -> None:
    run = _start("raise_in_rank_1", tmp_path)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 1 and out == ""
    assert err.startswith("error: rank 1 failed: ArithmeticError: the planted fault\n\nTraceback")
    assert err.count("Traceback") == 1 and "raise_in_rank_1" in err
    assert "gloo" not in err and "elastic" not in err, "the followers bury the cause"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and "the planted fault" in summary["error"]
    assert (summary["compressor"], summary["ranks"], summary["seed"]) == ("tagc2", 2, 0)


def test_bad_input_found_in_a_rank_is_only_its_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.path=/nowhere is missing; prepare it$"):
        launch(_make_config(), tmp_path, workers.blame_user_in_rank_1)


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankFailure, match=r"^rank 1 was killed by SIGKILL\nhint: .*memory"):
        launch(_make_config(), tmp_path, workers.kill_rank_1)
    assert time.monotonic() - start_s < 30


def test_a_rank_that_leaves_early_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1 ended with exit code 7"):
        launch(_make_config(), tmp_path, workers.exit_rank_1)


def test_an_old_summary_does_not_pass_for_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "done"}')
    config = _make_config(ranks=1)
    with pytest.raises(RankFailure, match=r"wrote no .*summary\.json"):
        launch(config, tmp_path, workers.write_nothing)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_failed_run_keeps_its_numbers_and_leaves_the_earlier_record_whole(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "done"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train_loss": 9.0}\n')
    config = _make_config(ranks=1)
    with pytest.raises(RankFailure, match="rank 0 ended with exit code 3"):
        launch(config, tmp_path, workers.record_two_steps_and_exit)
    assert json.loads((tmp_path / "earlier" / "1" / "summary.json").read_text()) == {"status": "done"}
    assert "9.0" in (tmp_path / "earlier" / "1" / "metrics.jsonl").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["train_loss"]) == ("failed", 2, 7.5)


def _check_interrupted(run: subprocess.Popen[str], run_dir: Path, number: signal.Signals, pids: list[int]) -> None:
    _, err = run.communicate(timeout=300)
    assert run.returncode == 128 + number
    said = err.splitlines()
    assert said[0].startswith("ending the ranks")
    assert said[-1] == f"interrupted by {number.name}; the ranks have ended"
    assert not [line for line in said if not line.startswith(("ending", "killing", "interrupted"))]
    assert not _wait_for_end(pids, timeout_s=0), "a rank outlived its launcher"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("interrupted", number.name)


def test_ctrl_c_ends_the_ranks_without_a_traceback(tmp_path: Path) -> None:
    """A terminal signals the whole process group, ranks included."""
    run = _start("hang", tmp_path)
    pids = [int(text) for text in _wait_for([tmp_path / "started_0", tmp_path / "started_1"])]
    os.killpg(run.pid, signal.SIGINT)
    _check_interrupted(run, tmp_path, signal.SIGINT, pids)


@pytest.mark.parametrize(
    ("first", "second", "gap_s"),
    [
        (signal.SIGINT, signal.SIGINT, 0.05),
        (signal.SIGINT, signal.SIGINT, 0.5),
        (signal.SIGTERM, signal.SIGINT, 0.5),
        (signal.SIGINT, signal.SIGTERM, 1.5),
    ],
)
def test_a_second_signal_kills_the_ranks_and_hangs_nothing(
    tmp_path: Path, first: signal.Signals, second: signal.Signals, gap_s: float
) -> None:
    """It interrupted torch elastic while that ended the ranks; launcher and ranks then waited for each other."""
    run = _start("hang", tmp_path)
    pids = [int(text) for text in _wait_for([tmp_path / "started_0", tmp_path / "started_1"])]
    os.killpg(run.pid, first)
    time.sleep(gap_s)
    os.kill(run.pid, second)
    try:
        _check_interrupted(run, tmp_path, first, pids)
    finally:
        run.kill()


def test_ctrl_c_twice_on_a_terminal_ends_the_run_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """A terminal sends SIGINT to launcher and ranks alike."""
    terminal, inside = pty.openpty()
    before = termios.tcgetattr(inside)
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.start", "hang", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path.parent)},
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        pids = [int(text) for text in _wait_for([tmp_path / "started_0", tmp_path / "started_1"])]
        os.write(terminal, b"\x03")
        time.sleep(0.3)
        os.write(terminal, b"\x03")
        assert run.wait(30) == 130
        assert not _wait_for_end(pids)
        assert termios.tcgetattr(inside) == before
        assert b"ending the ranks" in os.read(terminal, 10_000)
    finally:
        run.kill()
        os.close(terminal)
        os.close(inside)


def test_a_folder_in_use_is_refused_and_sigterm_ends_the_ranks(tmp_path: Path) -> None:
    run = _start("hang", tmp_path)
    pids = [int(text) for text in _wait_for([tmp_path / "started_0", tmp_path / "started_1"])]
    with pytest.raises(UserError, match="in use by another run"):
        launch(_make_config(), tmp_path, workers.sum_ranks)
    run.terminate()
    _check_interrupted(run, tmp_path, signal.SIGTERM, pids)


def test_a_stop_that_meets_a_restart_is_an_interruption(tmp_path: Path) -> None:
    config = _make_config(ranks=1)
    config.cluster.max_restarts = 1
    with pytest.raises(RunInterrupted) as stop:
        launch(config, tmp_path, workers.fail_while_the_launcher_is_stopped)
    assert stop.value.signal == signal.SIGTERM
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


def test_a_stop_that_comes_after_the_last_step_is_told_to_the_caller(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"status": "done"}')
    assert read_outcome(tmp_path, signal.SIGTERM)["stop_signal"] == signal.SIGTERM
    assert "stop_signal" not in read_outcome(tmp_path, None)


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run = _start("hang", tmp_path)
    pids = [int(text) for text in _wait_for([tmp_path / "started_0", tmp_path / "started_1"])]
    run.kill()
    run.communicate(timeout=300)
    assert not _wait_for_end(pids)


def test_a_folder_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file/run cannot be written .*hydra\.run\.dir"):
        launch(_make_config(), tmp_path / "file" / "run", workers.sum_ranks)


def test_a_data_error_leaves_a_failed_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object) -> None:
        raise UserError("data.path=x is truncated")

    monkeypatch.setattr(tagc.data, "prepare", refuse)
    with pytest.raises(UserError, match="truncated"):
        launch(_make_config(), tmp_path, workers.sum_ranks)
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "data.path=x is truncated"
