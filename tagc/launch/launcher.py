"""Start the ranks of one run and wait for them.

Each machine of a run has its launcher. On the first, usually the only one, it prepares the data and decides the run
folder (nodes.py); all of them start their share of ``cluster.ranks`` processes through torch elastic (the engine
behind torchrun) and turn whatever goes wrong into one readable error. A launcher never trains itself.
The parts below are imported when a run starts: they bring torch, and help, completion and bad input need not wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.device import count_cores, resolve_device
from tagc.host.signals import SIGNALS, STOP_FILE_VARIABLE, block_signals, forward_to_ranks, stop_file
from tagc.launch.attempts import begin_attempt, find_user_error, last_attempt
from tagc.launch.failures import RankFailure, find_root_cause, record_exception
from tagc.launch.nodes import Nodes, meet_nodes
from tagc.network import open_network

Worker = Callable[[Config, Any, str], None]  # (config, data, run folder), runs in every rank

_SHUTDOWN_S = 5  # ranks that ignore SIGTERM for this long are killed
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class FolderInUse(UserError):
    """The run folder belongs to a run that is still going on."""


REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command continues


class RunInterrupted(SystemExit):
    """The launcher got a signal and its ranks have ended.

    ``code`` is 75 if they left a checkpoint that the same command continues, else 128 + the signal, as shells count.
    """

    def __init__(self, signum: int, run_dir: Path | None = None) -> None:
        self.signal = signal.Signals(signum)
        self.can_continue = False
        if run_dir is not None and self.signal != signal.SIGINT:
            from tagc.train.checkpoint_files import list_checkpoints

            self.can_continue = bool(list_checkpoints(run_dir))
        super().__init__(REQUEUE_EXIT_CODE if self.can_continue else 128 + signum)


def launch(config: Config, run_dir: Path, worker: Worker | None = None) -> dict[str, Any]:
    """Run ``config`` in ``run_dir`` and return what its rank 0 wrote to ``summary.json`` (on other nodes nothing).

    ``stop_signal`` is added when a signal came too late to stop this run: its caller may have more to do.

    ``worker`` is a module-level function, :func:`tagc.train.worker.run_worker` by default. Must be called from the
    main thread, because it handles signals. A run that fails leaves a ``summary.json`` with its status and error.

    Ranks that fail are started again, ``cluster.max_restarts`` times, and continue the newest checkpoint.

    Errors: ``UserError`` for bad input, also when a rank raised it; :class:`RankFailure` when a rank failed
    otherwise; :class:`RunInterrupted` on SIGINT, SIGHUP, SIGTERM and SIGUSR1. No rank outlives this call.
    """
    run_dir = run_dir.absolute()
    if config.cluster.name == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise UserError("cluster=slurm submits a job with -m only: python run.py -m cluster=slurm ...")
    with _raise_on_signals(), meet_nodes(config.cluster) as nodes:
        if nodes.index:
            return _follow(config, worker, nodes)
        try:
            return _lead(config, run_dir, worker, nodes)
        except Exception as error:
            nodes.announce(error=str(error))  # too late to be heard if the ranks have started
            raise


def _lead(config: Config, run_dir: Path, worker: Worker | None, nodes: Nodes) -> dict[str, Any]:
    """On the first node, usually the only one: all that happens once for a run, and its ranks here."""
    with _claim_folder(run_dir):
        from tagc.train.resume import prepare_start

        prepare_start(run_dir, config)
        try:
            with nodes.open_report_folder(run_dir) as report_dir:
                stopped_by = _start_here(config, run_dir, report_dir, worker, nodes)
            return _read_outcome(run_dir, stopped_by)
        except KeyboardInterrupt:
            write_failed_summary(run_dir, "interrupted", "SIGINT", config)
            raise RunInterrupted(signal.SIGINT) from None
        except RunInterrupted as stop:
            write_failed_summary(run_dir, "interrupted", stop.signal.name, config)
            raise RunInterrupted(stop.signal, run_dir) from None
        except Exception as error:
            write_failed_summary(run_dir, "failed", str(error), config)
            raise


def _follow(config: Config, worker: Worker | None, nodes: Nodes) -> dict[str, Any]:
    """On the other nodes: ranks only. Writes nothing and returns nothing: the first node tells how the run ended."""
    start = nodes.wait_for_start()
    run_dir = Path(start["run_dir"])
    try:
        _read_outcome(run_dir, _start_here(config, run_dir, start["report_dir"], worker, nodes))
        return {}
    except RunInterrupted as stop:
        raise RunInterrupted(stop.signal, run_dir) from None


def _start_here(config: Config, run_dir: Path, report_dir: str, worker: Worker | None, nodes: Nodes) -> int | None:
    """Prepare the data and run this node's ranks; returns the signal that made them stop, if one did."""
    device = resolve_device(config.cluster.device, config.cluster.ranks_per_node)
    from tagc.data import prepare

    data = prepare(config.data)
    if nodes.index == 0:
        nodes.announce(run_dir=str(run_dir), report_dir=report_dir)
    with open_network(config, device) as (config, network):
        return _run_ranks(config, data, run_dir, report_dir, worker, network, nodes)


def _read_outcome(run_dir: Path, stopped_by: int | None) -> dict[str, Any]:
    """The summary of a run whose ranks have ended without an error."""
    from tagc.record import load_summary

    summary_path = run_dir / "summary.json"
    summary = load_summary(run_dir) if summary_path.exists() else {}
    status = summary.get("status")
    # A stop that meets a restart: the new ranks end at once, and the summary is the failed attempt's, if any.
    if status == "interrupted" or (stopped_by and status != "done"):
        raise RunInterrupted(stopped_by or signal.SIGTERM)
    if not summary:
        raise RankFailure(f"all ranks ended without an error, but rank 0 wrote no {summary_path}")
    return summary | {"stop_signal": stopped_by} if stopped_by else summary


def write_failed_summary(run_dir: Path, status: str, error: str, config: Config) -> None:
    """Leave a ``summary.json`` that says how the run ended, with the numbers of the steps it made.

    The error is the launcher's view; rank 0's own may know only that a peer is gone.
    """
    from tagc.host.files import write_text_atomic
    from tagc.record import load_rows, summarise

    metrics = run_dir / "metrics.jsonl"
    numbers = summarise(load_rows(metrics) if metrics.exists() else [], config)
    summary = {**numbers, "status": status, "error": error}
    write_text_atomic(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


@contextlib.contextmanager
def _claim_folder(run_dir: Path) -> Iterator[None]:
    """Create the run folder, check that it can be written, and hold it against a second run at the same time."""
    from tagc.host.files import prepare_run_dir

    prepare_run_dir(run_dir)
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FolderInUse(
            f"the run folder {run_dir} is in use by another run; set hydra.run.dir to a new one"
        ) from None
    except OSError:
        pass  # some network file systems have no locks; the default folder names do not collide anyway
    try:
        yield
    finally:
        os.close(handle)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise RunInterrupted(signum)


def _signals_to_handle(*signals: signal.Signals) -> list[signal.Signals]:
    """Those that the caller did not ask to be ignored (``nohup``)."""
    return [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]


@contextlib.contextmanager
def _raise_on_signals() -> Iterator[None]:
    """Turn signals into exceptions, and restore the handlers afterwards (elastic leaves its own behind)."""
    saved = {number: signal.getsignal(number) for number in _signals_to_handle(*SIGNALS, signal.SIGHUP)}
    for number in saved:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _keep_sigint_from_ranks() -> Iterator[None]:
    """Let Ctrl-C reach the launcher only; it ends the ranks, which would else print one traceback each.

    A terminal sends SIGINT to all processes in the foreground, also to ranks that are still importing. They inherit
    the signal mask of the thread that starts them, so that thread blocks SIGINT and a helper thread receives it;
    Python still raises ``KeyboardInterrupt`` in the main thread.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, name="sigint", daemon=True).start()
    try:
        with block_signals(signal.SIGINT):
            yield
    finally:
        done.set()


def shield_resource_tracker() -> None:
    """Start multiprocessing's helper so that it outlives SIGUSR1, which SLURM sends to every process of a step.

    SIGINT and SIGTERM it ignores by itself.
    """
    with block_signals(signal.SIGUSR1):
        resource_tracker.ensure_running()


def _threads_per_rank(config: Config) -> int:
    return config.cluster.threads_per_rank or max(1, count_cores() // config.cluster.ranks_per_node)


@contextlib.contextmanager
def _rank_environment(config: Config, report_dir: str, network: dict[str, str]) -> Iterator[None]:
    """Set what the ranks inherit, ``network`` included, and put the launcher's environment back afterwards."""
    saved = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(_threads_per_rank(config))
    os.environ[STOP_FILE_VARIABLE] = stop_file(report_dir)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback and config.cluster.nodes == 1:  # gloo would look up the host's name, and warn where that has no address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.update(network)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _run_ranks(
    config: Config,
    data: Any,
    run_dir: Path,
    report_dir: str,
    worker: Worker | None,
    network: dict[str, str],
    nodes: Nodes,
) -> int | None:
    """Start this node's ranks and wait until all have ended; returns the signal that made them stop, if one did."""
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False  # what they would say about a failed rank is said once, by find_root_cause
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    shield_resource_tracker()
    with _rank_environment(config, report_dir, network):
        try:
            with _keep_sigint_from_ranks(), forward_to_ranks(report_dir, config.cluster.grace_s, _interrupt) as stop:
                elastic_launch(_configure_agent(config, report_dir, nodes), _run_rank)(
                    worker, config, data, str(run_dir), report_dir
                )
        except SignalException as hangup:
            raise RunInterrupted(hangup.sigval) from None
        except ChildFailedError as failed:
            if stop.received:
                raise RunInterrupted(stop.received) from None
            rank, failure = failed.get_first_failure()
            raise find_root_cause(last_attempt(report_dir), rank, failure.exitcode, config.cluster.ranks) from None
        if error := find_user_error(report_dir):
            raise error
        return stop.received


def _configure_agent(config: Config, report_dir: str, nodes: Nodes) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    alone = nodes.count == 1
    return LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=config.cluster.ranks_per_node,
        run_id=uuid.uuid4().hex if alone else nodes.endpoint,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.endpoint,
        rdzv_configs={} if alone else {"is_host": False},  # the launchers have met at this store already
        local_addr="localhost" if alone else None,
        # Elastic counts restarts on each node for itself, and the counts would part: the attempts' folders, groups and
        # micro-batches would no longer fit each other.
        max_restarts=config.cluster.max_restarts if alone else 0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=report_dir),
        signals_to_handle=",".join(number.name for number in _signals_to_handle(signal.SIGHUP)),
        shutdown_timeout=_SHUTDOWN_S,
    )


def _die_with_launcher() -> None:
    """Have the kernel kill this rank when the launcher dies in a way that leaves it no time to do so (Linux).

    The signal comes when the *thread* that started the rank ends; that is the launcher's main thread.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    if launcher is not None and os.getppid() != launcher.pid:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _run_rank(worker: Worker | None, config: Config, data: Any, run_dir: str, report_dir: str) -> None:
    """Entry of every rank process; torch elastic has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_* and the attempt."""
    _die_with_launcher()
    attempt = begin_attempt(report_dir, config)
    if attempt.is_pointless:
        return
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # MKL caps what the variable asks for
    try:
        if worker is None:
            from tagc.train.worker import run_worker

            worker = run_worker
        worker(attempt.config, data, run_dir)
    except Exception as error:
        record_exception(attempt.report_dir, int(os.environ["RANK"]), error)
        # Tearing down a process group whose peers are gone can abort or hang; the failure is on record, so skip it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
