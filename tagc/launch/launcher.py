"""Start the ranks of one run and wait for them.

Each machine of a run has its launcher. On the first, usually the only one, it prepares the data and chooses the run
folder (nodes.py). Each starts its share of ``cluster.ranks`` processes (agent.py, rank.py) and raises one readable
error if one fails (failures.py). A launcher never trains itself.
torch is imported inside functions so that --help and validation stay fast.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tagc.config import Config
from tagc.errors import UserError
from tagc.host.device import resolve_device
from tagc.host.preflight import check_machine, refuse_torchrun
from tagc.launch.agent import run_ranks
from tagc.launch.folder import claim_folder, read_outcome, write_failed_summary
from tagc.launch.interrupts import Inbox, RunInterrupted, handle_signals
from tagc.launch.job import Job, Worker
from tagc.launch.nodes import meet_nodes
from tagc.network import open_network


def launch(config: Config, run_dir: Path, worker: Worker | None = None) -> dict[str, Any]:
    """Run ``config`` in ``run_dir`` and return what its rank 0 wrote to ``summary.json`` (on other nodes nothing).

    If a signal arrives after the last step, the summary carries ``stop_signal``; a sweep must then stop.

    ``worker`` is a module-level function, :func:`tagc.train.worker.run_worker` by default. Must be called from the
    main thread, because it handles signals. A run that fails leaves a ``summary.json`` with its status and error.

    Ranks that fail are started again, ``cluster.max_restarts`` times, and continue the newest checkpoint.

    Errors: ``UserError`` for bad input, also when a rank raised it; :class:`RankFailure` when a rank failed
    otherwise; :class:`RunInterrupted` on SIGINT, SIGHUP, SIGTERM and SIGUSR1. No rank outlives this call.
    """
    refuse_torchrun(os.environ)
    if config.cluster.name == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise UserError("cluster=slurm submits a job with -m only: python run.py -m cluster=slurm ...")
    from tagc.record.wandb.mirror import check_options

    check_options(config.logging)
    with handle_signals() as inbox, meet_nodes(config.cluster) as nodes:
        inbox.check()
        job = Job(config, run_dir.absolute(), worker, nodes)
        if nodes.index:
            return _follow(job, inbox)
        try:
            return _lead(job, inbox)
        except Exception as error:
            nodes.announce(error=str(error))  # nobody listens any more if the ranks have started
            raise


def _lead(job: Job, inbox: Inbox) -> dict[str, Any]:
    """On the first node, usually the only one: all that happens once for a run, and its ranks here."""
    run_dir, config = job.run_dir, job.config
    with claim_folder(run_dir):
        from tagc.train.resume import prepare_start

        prepare_start(run_dir, config)
        try:
            with job.nodes.open_report_folder(run_dir) as report_dir:
                stopped_by = _start_here(job.with_(report_dir=report_dir), inbox)
            return read_outcome(run_dir, stopped_by)
        except KeyboardInterrupt:
            write_failed_summary(run_dir, "interrupted", "SIGINT", config)
            raise RunInterrupted(signal.SIGINT) from None
        except RunInterrupted as stop:
            write_failed_summary(run_dir, "interrupted", stop.signal.name, config)
            raise RunInterrupted(stop.signal, run_dir) from None
        except Exception as error:
            write_failed_summary(run_dir, "failed", str(error), config)
            raise


def _follow(job: Job, inbox: Inbox) -> dict[str, Any]:
    """On the other nodes: ranks only. Writes and returns nothing, because the first node records how the run ended."""
    start = job.nodes.wait_for_start()
    run_dir = Path(start["run_dir"])
    try:
        read_outcome(run_dir, _start_here(job.with_(run_dir=run_dir, report_dir=start["report_dir"]), inbox))
        return {}
    except RunInterrupted as stop:
        raise RunInterrupted(stop.signal, run_dir) from None


def _start_here(job: Job, inbox: Inbox) -> int | None:
    """Prepare the data and run this node's ranks; returns the signal that made them stop, if one did."""
    device = resolve_device(job.config.cluster.device, job.config.cluster.ranks_per_node)
    check_machine(job.config, device, os.environ)
    from tagc.data import prepare

    job = job.with_(data=prepare(job.config.data))
    if job.nodes.index == 0:
        job.nodes.announce(run_dir=str(job.run_dir), report_dir=job.report_dir)
    with open_network(job.config, device) as (config, network), inbox.collect():
        return run_ranks(job.with_(config=config, device=device, network=network), inbox)
