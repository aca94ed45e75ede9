"""``python -m tagc.record.wandb.process RUN_DIR MODE``: mirror a run folder in W&B until standard input ends.

A process of its own, so that whatever ``wandb`` does (import, threads, a service, waiting for a server) costs the ranks
nothing, and so that the last rows are passed on even when the ranks were killed.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import threading
import time
from pathlib import Path

from filelock import FileLock

from tagc.errors import UserError
from tagc.record.wandb.mirror import end_by_force
from tagc.record.wandb.run import RunFeed, close_run, open_run, read_run_id

POLL_S = 1.0
FINISH_TIMEOUT_S = 15.0  # for the upload at the end; what is left then goes with `make wandb-sync`
END_TIMEOUT_S = 30.0  # for all that comes after the ranks, whose recorder gives up earlier if it is still there
LOCK_TIMEOUT_S = 60.0  # an attempt that was killed may still be passing on its last rows
NICENESS = 10
MIN_FREE_BYTES = 1 << 20  # wandb writes on without a word when the disk is full, and its log ends there


def lock_mirror(run_dir: Path, timeout_s: float) -> FileLock:
    """The lock on a run's mirror: one process at a time."""
    (run_dir / "wandb").mkdir(parents=True, exist_ok=True)
    return FileLock(run_dir / "wandb" / "mirror.lock", timeout=timeout_s)


def remove_offline_runs(run_dir: Path) -> None:
    """Remove the offline folders of earlier attempts: the one to come holds all of the run's rows."""
    for folder in (run_dir / "wandb").glob(f"offline-run-*-{read_run_id(run_dir)}"):
        shutil.rmtree(folder)


def require_space(folder: Path) -> None:
    """Errors: ``UserError`` when the disk of ``folder`` is as good as full."""
    if shutil.disk_usage(folder).free < MIN_FREE_BYTES:
        raise UserError(f"no space left on the disk of {folder}")


def end_after_ranks() -> None:
    """Wait until standard input ends, give the mirror its time, then end what is left: nobody else may be there."""
    select.select([sys.stdin], [], [])
    time.sleep(END_TIMEOUT_S)
    end_by_force(os.getpid())


def mirror(run_dir: Path, mode: str) -> None:
    """Pass rows on as they come, until standard input ends (the recorder has finished, or its process is gone)."""
    with lock_mirror(run_dir, LOCK_TIMEOUT_S):
        if mode == "offline":
            remove_offline_runs(run_dir)
        require_space(run_dir / "wandb")
        run = open_run(run_dir, mode, run_dir, FINISH_TIMEOUT_S)
        feed, is_over = RunFeed(run, run_dir), False
        while not is_over:
            is_over = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            require_space(run_dir / "wandb")
            feed.log_new()
        close_run(run, run_dir)


def main() -> int:
    """Exit status 1 with the reason as the last line of output."""
    os.nice(NICENESS)
    try:
        mirror(Path(sys.argv[1]), sys.argv[2])
    except BaseException as error:  # wandb raises SystemExit too
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.stdout.write(f"{reason}\n")
        sys.stdout.flush()
        return 1
    return 0


if __name__ == "__main__":
    threading.Thread(target=end_after_ranks, name="end-after-ranks", daemon=True).start()
    sys.exit(main())
