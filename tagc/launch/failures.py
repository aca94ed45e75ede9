"""What went wrong in a rank, told once: ranks record their exception, the launcher finds the first one.

When a rank dies, the others fail a moment later because their connection is gone. Those followers would bury the
cause, and torch elastic reports whichever it happens to see first; so each rank records what it raised and when, a
follower lingers until the agent has seen the rank that died, and the launcher picks the root cause.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any

from tagc.errors import UserError

# A lost neighbour as gloo, NCCL and the store put it.
_LOST_PEER = re.compile(r"gloo|nccl|processgroup|tcpstore|store->|connection (closed|reset|refused)|timed out", re.I)
_LINGER_S = 2.0  # longer than the agent's polling interval and the exit of a dying interpreter together

_HINTS = (
    (re.compile(r"out of memory|cannot allocate memory|MemoryError", re.I), "lower trainer.micro_batch or the model"),
    (re.compile(r"timed out|timeout", re.I), "a rank may be stuck; if it is only slow, raise cluster.timeout_s"),
    (re.compile(r"No space left", re.I), "free some space or set hydra.run.dir to another disk"),
)
_SIGNAL_HINTS = {
    "SIGKILL": "probably out of memory: lower cluster.ranks, trainer.micro_batch or the model's size",
    "SIGSEGV": "a native library crashed; its stack is printed above",
    "SIGABRT": "a native library gave up; its message is printed above",
    "SIGBUS": "often a full /dev/shm or a truncated memory-mapped file: check data.path and the free space",
}


class RankFailure(Exception):
    """A rank failed. The message tells which rank and how, with the rank's own traceback; no other is needed."""


def _is_lost_peer(error: BaseException) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError | OSError) and _LOST_PEER.search(str(error)) is not None
    )


def _is_accelerator_full(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def record_exception(report_dir: str, rank: int, error: Exception) -> None:
    """Write ``error`` to ``report_dir/rank_<rank>.json``; called in the rank, from the handler of its exception."""
    lost_peer = _is_lost_peer(error)
    below_entry = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is the launcher's own
    record = {
        "time_s": time.time(),
        "out_of_memory": _is_accelerator_full(error),
        "kind": "user" if isinstance(error, UserError) else "lost_peer" if lost_peer else "error",
        "message": str(error),
        "title": "".join(traceback.format_exception_only(error)).strip().splitlines()[0],
        "traceback": "".join(traceback.format_exception(type(error), error, below_entry)).rstrip(),
    }
    Path(report_dir, f"rank_{rank}.json").write_text(json.dumps(record))
    if lost_peer:
        time.sleep(_LINGER_S)


def _read_records(report_dir: str) -> dict[int, dict[str, Any]]:
    """Records by rank, in the order in which they were written."""
    found = {}
    for path in Path(report_dir).glob("rank_*.json"):
        with contextlib.suppress(ValueError):  # a rank that is ended while it writes leaves a torn record
            found[int(path.stem.removeprefix("rank_"))] = json.loads(path.read_text())
    return dict(sorted(found.items(), key=lambda item: item[1]["time_s"]))


def _with_hint(message: str, hint: str | None) -> str:
    return f"{message}\nhint: {hint}" if hint else message


def _describe_exit(rank: int, exit_code: int) -> str:
    if exit_code >= 0:
        return f"rank {rank} ended with exit code {exit_code} and no Python traceback"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return _with_hint(f"rank {rank} was killed by {name}", _SIGNAL_HINTS.get(name))


def find_root_cause(report_dir: str, rank: int, exit_code: int, ranks: int) -> RankFailure | UserError:
    """The first failure of a run, as one exception to raise in the launcher.

    ``rank`` and ``exit_code`` (negative: a signal) are what the agent saw first. A rank killed by a signal is the
    cause, unless it aborted after another had raised; else the first exception that is not a lost connection; else
    the first lost connection.
    """
    records = _read_records(report_dir)
    first = next((r for r, record in records.items() if record["kind"] != "lost_peer"), None)
    killed = exit_code < 0 and (first is None or exit_code != -signal.SIGABRT)
    if first is None:
        first = next(iter(records), None)
    if killed or first is None:
        return RankFailure(_describe_exit(rank, exit_code))
    record = records[first]
    if record["kind"] == "user":
        return UserError(record["message"])
    hint = next((text for pattern, text in _HINTS if pattern.search(record["message"])), None)
    silent = [other for other in range(ranks) if other not in records]
    if record["kind"] == "lost_peer" and silent:
        hint = f"rank {', '.join(map(str, silent))} did not answer, so look there first; {hint or ''}".rstrip("; ")
    return RankFailure(_with_hint(f"rank {first} failed: {record['title']}\n\n{record['traceback']}\n", hint))


def find_user_message(report_dir: str) -> str | None:
    """The first bad input that a rank found, if one did."""
    return next((r["message"] for r in _read_records(report_dir).values() if r["kind"] == "user"), None)


def ended_file(report_dir: str, rank: int) -> str:
    """Written by a rank that was sent SIGTERM: it did not end by itself."""
    return str(Path(report_dir, f"rank_{rank}.ended"))


def is_out_of_memory(report_dir: str) -> bool:
    """Whether a rank ran out of an accelerator's memory."""
    return any(record["out_of_memory"] for record in _read_records(report_dir).values())


def describe_failure(report_dir: str, ranks: int) -> str:
    """What ended an attempt, in one line, as far as its ranks could tell."""
    records = _read_records(report_dir)
    first = next((r for r, record in records.items() if record["kind"] != "lost_peer"), None)
    silent = [rank for rank in range(ranks) if rank not in records]
    if first is None and silent:
        silent = [rank for rank in silent if not Path(ended_file(report_dir, rank)).exists()] or silent
        return f"rank {', '.join(map(str, silent))} was killed, crashed or hung"
    first = first if first is not None else next(iter(records))
    return f"rank {first} failed: {records[first]['title']}"
