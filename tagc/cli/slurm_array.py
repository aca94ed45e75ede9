"""``cluster=slurm``: the points of a sweep as one SLURM array, through submitit.

Submitit writes the batch script, carries the point to the job and brings the result back. What is different here: the
request is checked before it is submitted; a run that was told to stop saves first, then the script puts its job back
into the queue (``slurm/requeue.sh``, as in ``slurm/*.sbatch``); the end of an array is seen without an accounting
database.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import OmegaConf

from tagc.cli.slurm import ENDED, FAILED, cancel_waiting, check_submission, hide_other_settings, read_states
from tagc.errors import SweepStopped, UserError
from tagc.host.signals import block_signals
from tagc.sweep.jobs import is_first_node

ROOT = Path(__file__).parents[2]
TARGET = "hydra_plugins.tagc.ArrayLauncher"  # conf/hydra/launcher/slurm.yaml; Hydra takes launchers of no other package
_SWEPT_FREELY = ("ranks", "threads_per_rank", "timeout_s", "max_restarts", "grace_s", "device")
_POLL_S = (1.0, 15.0)  # at first, and after a while
_FILE_S = 30.0  # a shared file system shows a result so late

log = logging.getLogger("tagc")


class ArrayLauncher(SlurmLauncher):
    """Runs the jobs that a sweeper gives it as tasks of one array, and waits for all of them."""

    def __call__(self, sweep_overrides: list[str], *args: Any, **kwargs: Any) -> JobReturn:
        """In the job, on each node: run one point. SLURM shall see when it failed."""
        if not is_first_node(self.config.cluster.nodes):  # the first node alone writes the run folder
            sweep_overrides = [*sweep_overrides, "hydra.output_subdir=null"]
        job_return = super().__call__(sweep_overrides, *args, **kwargs)
        if job_return.status is JobStatus.FAILED:
            sys.exit(1)
        return job_return

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Submit the array and wait until SLURM has ended every task.

        Returns: one ``JobReturn`` per job; of a task that failed or was cancelled, one that holds a ``RuntimeError``.
        Errors: ``UserError`` if the array could not be accepted; nothing has been submitted then. ``SweepStopped``
        when a task failed and ``sweep.fail_fast`` is set.
        """
        check_same_request(job_overrides)
        check_nothing_queued(Path(self.params["submitit_folder"]).parent)
        params = self._complete_params(max(_read_ranks(job_overrides, self.config.cluster.ranks)))
        with hide_other_settings(params):
            check_submission(params, len(job_overrides))
            with block_signals(signal.SIGINT):  # a Ctrl-C between sbatch and the files that the tasks read
                jobs = self._submit(params, job_overrides, initial_job_idx)
                array_id = jobs[0].job_id.split("_")[0]
                for job, overrides in zip(jobs, job_overrides, strict=True):
                    point = " ".join(filter_overrides(overrides))
                    log.info("task %s: %s; log: %s", job.job_id, point, job.paths.stdout)
                log.info("submitted %d point(s) as SLURM array %s; it needs this command no more", len(jobs), array_id)
        try:
            states = wait_for_array(array_id, self.config.sweep.fail_fast)
        except KeyboardInterrupt:
            log.warning("SLURM array %s goes on; squeue -j %s, scancel %s (its runs save first)", *[array_id] * 3)
            raise
        if self.config.sweep.fail_fast and not FAILED.isdisjoint(states.values()):
            raise SweepStopped
        return [_collect(job, states) for job in jobs]

    def _complete_params(self, ranks: int) -> dict[str, Any]:
        """The settings of ``hydra.launcher``, with what follows from others; ``ranks``: of the largest point."""
        cluster = self.config.cluster
        params = {name: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for name, v in self.params.items()}
        if params["cpus_per_task"] is None:
            params["cpus_per_task"] = (cluster.threads_per_rank or 1) * ranks // cluster.nodes
        return params

    def _submit(self, params: dict[str, Any], job_overrides: Sequence[Sequence[str]], first: int) -> list[Any]:
        """One submitit job per point. Errors: ``UserError`` with SLURM's words where it refuses."""
        points = [
            (list(overrides), "hydra.sweep.dir", number, f"point_{number}", Singleton.get_state())
            for number, overrides in enumerate(job_overrides, first)
        ]
        executor = self._make_executor(params)
        from submitit.core.utils import FailedJobError

        Path(str(self.config.hydra.sweep.dir)).absolute().mkdir(parents=True, exist_ok=True)
        try:
            if len(points) == 1:
                return [executor.submit(self, *points[0])]
            return list(executor.map_array(self, *zip(*points, strict=True)))
        except FailedJobError as refused:
            raise UserError(f"SLURM did not take the array of {len(points)}: {str(refused).strip()}") from refused

    def _make_executor(self, params: dict[str, Any]) -> Any:
        """Submitit's, with the complete settings of this launcher."""
        os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # what the ranks listen to; read when submitit is imported
        import submitit

        cluster = self.config.cluster
        params = dict(params)
        folder, timeouts = str(params.pop("submitit_folder")), params.pop("max_num_timeout")
        params["setup"] = [
            f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
            f"export SUBMITIT_PREEMPT_SIGNAL=USR1 SLURM_WAIT=60 TAGC_MAX_REQUEUES={cluster.max_requeues}",
            *(*cluster.setup, *(params["setup"] or ())),  # OmegaConf cannot interpolate a typed list
            "trap : TERM  # SLURM sends it to all processes of the job; this one waits for the ranks to save",
            f"trap '{shlex.quote(str(ROOT / 'slurm' / 'requeue.sh'))} $?' EXIT",
        ]
        python = f"{cluster.container} python" if cluster.container else None
        executor = submitit.AutoExecutor(
            folder=folder, cluster="slurm", slurm_max_num_timeout=timeouts, slurm_python=python
        )
        shared = set(OmegaConf.structured(BaseQueueConf))  # submitit names the others after the scheduler
        executor.update_parameters(**{name if name in shared else f"slurm_{name}": v for name, v in params.items()})
        return executor


def register_launcher() -> None:
    """Make :class:`ArrayLauncher` known to Hydra."""
    Plugins.instance().class_name_to_class[TARGET] = ArrayLauncher


def _cluster_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    keys = {override.key_or_group: override.value() for override in parsed}
    return {key: value for key, value in keys.items() if key.startswith("cluster.")}


def _read_ranks(job_overrides: Sequence[Sequence[str]], default: int) -> list[int]:
    return [int(_cluster_overrides(overrides).get("cluster.ranks", default)) for overrides in job_overrides]


def check_same_request(job_overrides: Sequence[Sequence[str]]) -> None:
    """All tasks of an array ask for the same. Errors: ``UserError`` naming the key that differs."""
    requests = [_cluster_overrides(overrides) for overrides in job_overrides]
    for key in sorted({key for request in requests for key in request}):
        values = {str(request.get(key)) for request in requests}
        if len(values) > 1 and key.removeprefix("cluster.") not in _SWEPT_FREELY:
            raise UserError(
                f"{key}={','.join(sorted(values))}: all tasks of a SLURM array ask for the same; submit one sweep for "
                "each value"
            )


def check_nothing_queued(submitit_dir: Path) -> None:
    """Errors: ``UserError`` while an array that was submitted from this sweep's folder has tasks in the queue."""
    for array_id in sorted({path.name.split("_")[0] for path in submitit_dir.glob("[0-9]*")}):
        if any(state not in ENDED for state in read_states(array_id).values()):
            raise UserError(
                f"SLURM array {array_id} of the sweep in {submitit_dir.parent} is still in the queue (squeue -j "
                f"{array_id}); wait for its end, or scancel {array_id}; then this command runs what is missing"
            )


def wait_for_array(array_id: str, fail_fast: bool = False) -> dict[str, str]:
    """Wait until SLURM has ended every task; returns the last state that it told of each. Tells of every change.

    ``fail_fast``: once a task has failed, those that wait are cancelled; those that run go on.
    """
    states: dict[str, str] = {}
    told, stopped, warned = "", False, False
    started_s = time.monotonic()
    while True:
        try:
            current = read_states(array_id)
            states |= current
            if told != (told := _count(states)):
                log.info("SLURM array %s: %s", array_id, told)
            if all(state in ENDED for state in current.values()):
                return states
            if fail_fast and not stopped and not FAILED.isdisjoint(states.values()):
                log.warning("a task has failed and sweep.fail_fast is set; cancelling those that wait")
                cancel_waiting(array_id)
                stopped = True
        except UserError as silence:  # a controller that restarts; the tasks go on meanwhile
            if not warned:
                log.warning("%s; waiting for it", silence)
            warned = True
        time.sleep(min(_POLL_S[1], max(_POLL_S[0], (time.monotonic() - started_s) / 20)))


def _count(states: dict[str, str]) -> str:
    counts = Counter(states.values())
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _collect(job: Any, states: dict[str, str]) -> JobReturn:
    """What the task returned; SLURM's word for one that left nothing."""
    from submitit.core.utils import pickle_load

    state = states.get(job.job_id, "unknown to SLURM")
    end_s = time.monotonic() + _FILE_S
    while state == "COMPLETED" and not job.paths.result_pickle.exists() and time.monotonic() < end_s:
        time.sleep(0.5)
    if job.paths.result_pickle.exists():
        outcome, result = pickle_load(job.paths.result_pickle)
        if outcome == "success":
            return result
    failed = JobReturn()
    failed.status = JobStatus.FAILED
    message = f"task {job.job_id} left the queue as {state}; its log: {job.paths.stdout}"
    log.warning(message)
    failed.return_value = RuntimeError(message)
    return failed
