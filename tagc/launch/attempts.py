"""Attempts: torch elastic starts all ranks again when one fails; here is what a new attempt knows of those before.

Each attempt has its folder of rank errors in the launcher's report folder.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.signals import ENDED_FILE_VARIABLE, RESTART_VARIABLE, stop_file
from tagc.launch.failures import describe_failure, ended_file, find_user_message, is_out_of_memory


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, seen from a rank."""

    report_dir: str
    config: Config  # of this attempt
    is_pointless: bool  # it would fail in the same way, or nobody waits for it


def _attempt_dir(report_dir: str, number: int) -> str:
    return str(Path(report_dir, f"attempt_{number:06d}"))


def last_attempt(report_dir: str) -> str:
    """The error folder of the newest attempt."""
    found = sorted(Path(report_dir).glob("attempt_*"))
    return str(found[-1]) if found else report_dir


def find_user_error(report_dir: str) -> UserError | None:
    """The bad input that a rank of any attempt found."""
    messages = (find_user_message(str(path)) for path in sorted(Path(report_dir).glob("attempt_*")))
    return next((UserError(message) for message in messages if message is not None), None)


def begin_attempt(report_dir: str, config: Config) -> Attempt:
    """Called first in every rank. Sets what it says about a restart, and the file that it writes when it is ended."""
    number, allowed = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    own_dir = _attempt_dir(report_dir, number)
    os.makedirs(own_dir, exist_ok=True)
    os.environ[ENDED_FILE_VARIABLE] = ended_file(own_dir, int(os.environ["RANK"]))
    before = [_attempt_dir(report_dir, i) for i in range(number)]
    config = _save_memory(config, sum(map(is_out_of_memory, before)))
    if before:
        cause = describe_failure(before[-1], config.cluster.ranks)
        micro = f"; trainer.micro_batch is now {config.micro_batch}" if is_out_of_memory(before[-1]) else ""
        os.environ[RESTART_VARIABLE] = f"restart {number} of at most {allowed} after: {cause}{micro}"
    is_pointless = bool(before) and (find_user_error(report_dir) is not None or os.path.exists(stop_file(report_dir)))
    return Attempt(own_dir, config, is_pointless)


def _save_memory(config: Config, times: int) -> Config:
    """Halve the micro-batch ``times`` times, to a divisor of the rank's batch; the global one stays."""
    rank_batch = config.trainer.global_batch // config.cluster.ranks
    for _ in range(times):
        sizes = (size for size in range(config.micro_batch // 2, 0, -1) if rank_batch % size == 0)
        config = deepcopy(config)
        config.trainer.micro_batch = next(sizes, 1)
    return config
