"""Start this machine's ranks through torch elastic, the engine behind torchrun, and wait for them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

from tagc.config import Config
from tagc.host.device import count_cores
from tagc.host.signals import STOP_FILE_VARIABLE, block_signals, stop_file
from tagc.launch.attempts import find_user_error, last_attempt
from tagc.launch.failures import find_root_cause
from tagc.launch.interrupts import SHUTDOWN_S, Inbox, RunInterrupted, await_ranks
from tagc.launch.job import Job
from tagc.launch.rank import run_rank
from tagc.launch.rank_server import start_server


def run_ranks(job: Job, inbox: Inbox) -> int | None:
    """Start this node's ranks and wait until all have ended; returns the signal that made them stop, if one did.

    Torch elastic runs in a thread: the main thread receives signals, which must not interrupt it (interrupts.py).
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False  # what they would say about a failed rank is said once, by find_root_cause
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    shield_resource_tracker()
    failure: list[BaseException] = []

    def start_and_join() -> None:
        try:
            with block_signals(signal.SIGINT):  # ranks inherit it: a terminal sends Ctrl-C to them, too
                elastic_launch(configure_agent(job), run_rank)(job.for_ranks())
        except BaseException as error:
            failure.append(error)

    with _rank_environment(job):
        if job.device != "cuda":
            start_server()
        elastic = threading.Thread(target=start_and_join, name="elastic", daemon=True)
        elastic.start()
        stopped_by = await_ranks(elastic, inbox, job.report_dir, job.config.cluster.grace_s)
    if failure and stopped_by:
        raise RunInterrupted(stopped_by)
    if failure and isinstance(failure[0], ChildFailedError):
        rank, first = failure[0].get_first_failure()
        raise find_root_cause(last_attempt(job.report_dir), rank, first.exitcode, job.config.cluster.ranks) from None
    if failure:
        raise failure[0]
    if error := find_user_error(job.report_dir):
        raise error
    return stopped_by


def shield_resource_tracker() -> None:
    """Start multiprocessing's helper so that it outlives the launcher's clean-up.

    SLURM sends SIGUSR1 to every process of a step, a closed terminal SIGHUP. SIGINT and SIGTERM it ignores by itself.
    """
    with block_signals(signal.SIGUSR1, signal.SIGHUP):
        resource_tracker.ensure_running()


def _threads_per_rank(config: Config) -> int:
    return config.cluster.threads_per_rank or max(1, count_cores() // config.cluster.ranks_per_node)


@contextlib.contextmanager
def _rank_environment(job: Job) -> Iterator[None]:
    """Set what the ranks inherit, ``job.network`` included, and put the launcher's environment back afterwards."""
    saved = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(_threads_per_rank(job.config))
    os.environ[STOP_FILE_VARIABLE] = stop_file(job.report_dir)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback and job.nodes.count == 1:  # gloo would look up the host's name, and warn where that has no address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.update(job.network)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def configure_agent(job: Job) -> Any:
    """Torch elastic's ``LaunchConfig`` for this machine's share of the ranks."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    cluster, nodes = job.config.cluster, job.nodes
    alone = nodes.count == 1
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=cluster.ranks_per_node,
        run_id=uuid.uuid4().hex if alone else nodes.endpoint,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.endpoint,
        rdzv_configs={} if alone else {"is_host": False},  # the launchers have met at this store already
        local_addr="127.0.0.1" if alone else None,
        # Elastic counts restarts on each node for itself, and the counts would part: the attempts' folders, groups and
        # micro-batches would no longer fit each other.
        max_restarts=cluster.max_restarts if alone else 0,
        start_method="spawn" if job.device == "cuda" else "forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=job.report_dir),
        shutdown_timeout=int(SHUTDOWN_S),
    )
