"""Which of several failures is the cause."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tagc.errors import UserError
from tagc.launch import failures
from tagc.launch.failures import RankFailure, describe_failure, ended_file, find_root_cause, record_exception


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_LINGER_S", 0)


def _record(folder: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        record_exception(str(folder), rank, raised)


LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")


def test_a_lost_connection_is_not_the_cause_even_when_it_came_first(tmp_path: Path) -> None:
    _record(tmp_path, 0, LOST_PEER)
    _record(tmp_path, 1, KeyError("the planted fault"))
    cause = find_root_cause(str(tmp_path), rank=0, exit_code=1, ranks=2)
    assert isinstance(cause, RankFailure) and str(cause).startswith("rank 1 failed: KeyError: 'the planted fault'\n\n")


def test_the_first_of_two_exceptions_is_the_cause(tmp_path: Path) -> None:
    _record(tmp_path, 1, UserError("seed=7 is bad"))
    _record(tmp_path, 0, UserError("seed=7 is bad here too"))
    cause = find_root_cause(str(tmp_path), rank=0, exit_code=1, ranks=2)
    assert isinstance(cause, UserError) and str(cause) == "seed=7 is bad"


def test_a_killed_rank_is_the_cause_whatever_the_others_say(tmp_path: Path) -> None:
    _record(tmp_path, 0, LOST_PEER)
    cause = find_root_cause(str(tmp_path), rank=1, exit_code=-signal.SIGSEGV, ranks=2)
    assert str(cause).startswith("rank 1 was killed by SIGSEGV\nhint: ")


def test_an_abort_after_an_exception_is_not_the_cause(tmp_path: Path) -> None:
    _record(tmp_path, 1, ValueError("the planted fault"))
    cause = find_root_cause(str(tmp_path), rank=0, exit_code=-signal.SIGABRT, ranks=2)
    assert str(cause).startswith("rank 1 failed: ValueError: the planted fault")


def test_lost_connections_alone_are_told_with_a_hint(tmp_path: Path) -> None:
    _record(tmp_path, 0, RuntimeError("[gloo] Timed out waiting 300000ms for recv operation to complete"))
    cause = find_root_cause(str(tmp_path), rank=0, exit_code=1, ranks=2)
    assert "rank 0 failed" in str(cause) and "hint: " in str(cause) and "cluster.timeout_s" in str(cause)


def test_a_rank_that_fell_silent_is_named(tmp_path: Path) -> None:
    """Stopped or stuck: it leaves no record, while the others time out waiting for it."""
    _record(tmp_path, 2, RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete"))
    message = str(find_root_cause(str(tmp_path), rank=2, exit_code=1, ranks=3))
    assert "rank 0, 1 did not answer" in message
    assert "cluster.timeout_s" in message


def test_a_rank_that_was_ended_in_silence_is_not_the_cause(tmp_path: Path) -> None:
    """Under load torch elastic sends SIGTERM before the others have noticed that their neighbour is gone."""
    assert describe_failure(str(tmp_path), 2) == "rank 0, 1 was killed, crashed or hung"
    Path(ended_file(str(tmp_path), 0)).touch()
    assert describe_failure(str(tmp_path), 2) == "rank 1 was killed, crashed or hung"
    Path(ended_file(str(tmp_path), 1)).touch()
    assert describe_failure(str(tmp_path), 2) == "rank 0, 1 was killed, crashed or hung"


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_0.json").write_text('{"time_s": 1, "kind": "err')
    assert str(find_root_cause(str(tmp_path), rank=0, exit_code=3, ranks=2)).startswith("rank 0 ended with exit code 3")
