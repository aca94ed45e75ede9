"""What a rank does with a signal that was meant for it alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tagc.host.signals import ENDED_FILE_VARIABLE, STOP_FILE_VARIABLE, stop_file

STUCK = """
import ctypes
from tagc.host import signals

signals._LONE_SIGTERM_S = 0.1
with signals.listen_in_rank() as is_requested:
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it is taken, and the main thread never comes back to Python
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("all_stop", [False, True])
def test_a_rank_stuck_in_a_collective_ends_on_sigterm_unless_all_stop(tmp_path: Path, all_stop: bool) -> None:
    """Torch elastic sends SIGTERM to the others when a rank has failed; it would wait 30 s for one that stays."""
    if all_stop:
        Path(stop_file(str(tmp_path))).touch()
    ended = tmp_path / "ended"
    environment = {STOP_FILE_VARIABLE: stop_file(str(tmp_path)), ENDED_FILE_VARIABLE: str(ended)}
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
        time.sleep(0.3)  # until it is stuck
        rank.send_signal(signal.SIGTERM)
        try:
            assert rank.wait(timeout=1 if all_stop else 300) == 128 + signal.SIGTERM and not all_stop
        except subprocess.TimeoutExpired:
            assert all_stop
        else:
            assert ended.exists()
        finally:
            rank.kill()
