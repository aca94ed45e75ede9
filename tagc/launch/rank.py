"""The first code of a rank process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

from tagc.launch.attempts import begin_attempt
from tagc.launch.failures import record_exception
from tagc.launch.job import Job, Worker
from tagc.launch.rank_server import enter_rank

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_rank(job: Job) -> None:
    """Entry of every rank process; torch elastic has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_* and the attempt."""
    enter_rank(job.environment)
    _die_with_launcher()
    attempt = begin_attempt(job.report_dir, job.config)
    if attempt.is_pointless:
        return
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # MKL caps what the variable asks for
    try:
        worker = job.worker or _default_worker()
        worker(attempt.config, job.data, str(job.run_dir))
    except Exception as error:
        record_exception(attempt.report_dir, int(os.environ["RANK"]), error)
        # Tearing down a process group whose peers are gone can abort or hang; the failure is on record, so skip it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _default_worker() -> Worker:
    from tagc.train.worker import run_worker

    return run_worker


def _die_with_launcher() -> None:
    """Have the kernel kill this rank when the launcher dies in a way that leaves it no time to do so (Linux).

    The signal comes when the *thread* that started the rank ends: the one that waits for spawned ranks, or the server,
    which ends with the launcher.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
