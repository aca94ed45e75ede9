"""Who may run in a folder: two processes, killed ones, other machines, and file systems without locks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tagc.host import run_lock
from tagc.host.run_lock import FolderInUse, find_holder, hold_folder, wait_for_signs
from tagc.sweep.states import State, read_state

ROOT = Path(__file__).parents[2]
NO_LOCKS = "import errno, fcntl\ndef flock(*_): raise OSError(errno.ENOTSUP, 'no locks')\nfcntl.flock = flock\n"
FAST = "from tagc.host import run_lock\nrun_lock.HEARTBEAT_S, run_lock.SILENCE_S, run_lock.POLL_S = 0.1, 2.0, 0.05\n"
HOLD = """
import sys
from pathlib import Path
from tagc.sweep.states import record_job
with record_job(Path(sys.argv[1]), {"source": "first"}):
    print("held", flush=True)
    sys.stdin.read()
"""
RUN = """
import sys
from pathlib import Path
from tagc.config import Config
from tagc.host.run_lock import FolderInUse
from tagc.sweep.jobs import run_point
try:
    run_point(Config(), Path(sys.argv[1]), lambda config, run_dir: print("launched") or {})
except FolderInUse as refused:
    print("refused:", refused)
"""


def list_files(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@contextmanager
def holder(folder: Path, setup: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder; killed at the end."""
    command = [sys.executable, "-c", setup + HOLD, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("prefix", [(), ("unshare", "-pf", "--mount-proc")], ids=["same", "own PID namespace"])
def test_a_refused_command_leaves_the_files_of_the_first_alone(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a PID namespace can be made by root only")
    folder = tmp_path / "point"
    second = [*prefix, sys.executable, "-c", RUN, str(folder)]
    with holder(folder) as first:
        before = list_files(folder)
        assert json.loads(before["job.json"])["code"] == {"source": "first"}
        refused = subprocess.run(second, cwd=ROOT, capture_output=True, text=True)
        assert "in use by another run" in refused.stdout and f"process {first.pid}" in refused.stdout, refused.stderr
        assert list_files(folder) == before
        assert read_state(folder) is State.RUNNING
    assert read_state(folder) is State.INTERRUPTED, "killed"
    again = subprocess.run(second, cwd=ROOT, capture_output=True, text=True)
    assert again.stdout == "launched\n", again.stderr
    assert ".lock" not in list_files(folder)


def test_without_locks_the_heartbeat_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    monkeypatch.setattr(run_lock, "SILENCE_S", 2.0)
    monkeypatch.setattr(run_lock, "POLL_S", 0.05)
    with holder(tmp_path, NO_LOCKS + FAST):
        before = list_files(tmp_path)
        with pytest.raises(FolderInUse), hold_folder(tmp_path):
            pass
        assert list_files(tmp_path) == before
    time.sleep(2.1)  # silence since its last sign of life
    with hold_folder(tmp_path), hold_folder(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        assert find_holder(tmp_path) is None, "our own"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".lock")] == []


@pytest.mark.parametrize("clock_s", [-300, 0, 3600], ids=["behind", "right", "ahead"])
def test_another_machine_is_judged_by_changes_not_by_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_s: int
) -> None:
    monkeypatch.setattr(run_lock, "SILENCE_S", 1.0)
    monkeypatch.setattr(run_lock, "POLL_S", 0.05)
    lock = tmp_path / ".lock"
    lock.write_text(json.dumps({"host": "elsewhere", "machine": "another", "pid": 1}))

    def touch() -> None:
        os.utime(lock, (time.time() + clock_s,) * 2)

    touch()
    ended = threading.Event()
    beats = threading.Thread(target=_repeat, args=(touch, ended))
    beats.start()
    try:
        wait_for_signs([tmp_path])
        assert read_state(tmp_path) is State.RUNNING
        with pytest.raises(FolderInUse, match="process 1 on elsewhere"), hold_folder(tmp_path):
            pass
    finally:
        ended.set()
        beats.join()
    assert lock.exists()
    time.sleep(1.1)  # silence
    wait_for_signs([tmp_path])
    assert read_state(tmp_path) is State.PENDING
    with hold_folder(tmp_path):
        pass


def _repeat(work: Callable[[], None], ended: threading.Event) -> None:
    while not ended.wait(0.05):
        work()


def test_our_own_job_that_slurm_started_again_need_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = {"host": "elsewhere", "machine": "another", "pid": 1, "slurm_job": "7", "slurm_restarts": None}
    (tmp_path / ".lock").write_text(json.dumps(lock))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert find_holder(tmp_path) == lock, "another task of the same job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert find_holder(tmp_path) is None
    with hold_folder(tmp_path):
        pass
