"""What SLURM's own commands say: whether an array can be accepted before it is submitted, and how its tasks fare."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from tagc.errors import UserError

# What hydra.launcher calls them, and what sbatch does.
_OPTIONS = ("partition", "account", "constraint", "qos", "nodes", "gpus_per_node", "cpus_per_task", "gres", "exclude")
_REMEDIES = (  # sbatch's words, the keys to look at
    ("account", "cluster.account, as `sacctmgr show associations` lists them"),
    ("feature specification", "cluster.constraint, as `sinfo -o %f` lists the nodes' features"),
    ("node count", "cluster.nodes, cluster.partition"),
    (
        "node configuration",
        "cluster.gpus_per_node, cluster.cpus_per_task (else cluster.threads_per_rank and cluster.ranks), "
        "hydra.launcher.mem_gb; `sinfo -o '%c %m %G'` lists the nodes' CPUs, memory and GPUs",
    ),
    ("gres", "cluster.gpus_per_node, as `sinfo -o %G` lists the nodes' GPUs"),
    ("qos", "hydra.launcher.qos"),
    ("time limit", "cluster.time"),
)
FAILED = {"FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
ENDED = {"CANCELLED", "COMPLETED", "PREEMPTED", *FAILED}
_SET_ALWAYS = {
    f"SBATCH_{name}"
    for name in ("TIMELIMIT", "SIGNAL", "ARRAY_INX", "NO_REQUEUE", "OPEN_MODE", "JOB_NAME", "OUTPUT", "ERROR", "WAIT")
}
_OTHER_NAMES = {"mem_gb": "MEM_PER_NODE"}  # of settings, in sbatch's environment
_KEPT_IN_JOB = {"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"}  # how to reach SLURM, nothing of the job
_ANSWER_S = 60


@contextlib.contextmanager
def hide_other_settings(params: Mapping[str, Any]) -> Iterator[None]:
    """Hide from sbatch what would override ``params``, the settings of ``hydra.launcher``, or mislead the new job.

    To sbatch a ``SBATCH_PARTITION`` in the environment is worth more than the script's line. And where this command
    runs inside a job, the new one would inherit that one's number, array index and restarts.
    """
    names = (_OTHER_NAMES.get(name, name.upper()) for name, value in params.items() if value is not None)
    set_here = _SET_ALWAYS | {f"SBATCH_{name}" for name in names}
    in_job = ("SLURM_", "SLURMD_", "SRUN_") if "SLURM_JOB_ID" in os.environ else ()
    hidden = [name for name in os.environ if name in set_here or (name.startswith(in_job) and name not in _KEPT_IN_JOB)]
    saved = {name: os.environ.pop(name) for name in hidden}
    try:
        yield
    finally:
        os.environ.update(saved)


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {_ANSWER_S} s")


def _ask(*command: str) -> str:
    done = _call(*command)
    if done.returncode:
        raise UserError(f"cluster=slurm: `{' '.join(command)}` says: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def check_submission(params: Mapping[str, Any], tasks: int) -> None:
    """Whether SLURM would take an array of ``tasks`` with these settings of ``hydra.launcher``. Submits nothing.

    Errors: ``UserError`` without SLURM's commands, for an unknown or closed partition, one that allows less time or has
    fewer nodes, more tasks than an array may have, and for whatever else ``sbatch --test-only`` refuses (CPUs, GPUs,
    features, account).
    """
    if shutil.which("sbatch") is None:
        raise UserError("cluster=slurm: there is no sbatch in PATH; log in to a node of the cluster, or cluster=local")
    _check_partition(params)
    sizes = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    if sizes and tasks > int(sizes[1]):
        raise UserError(
            f"the sweep has {tasks} points to run, but an array of this cluster at most {sizes[1]} tasks "
            "(MaxArraySize); sweep over fewer values at once: points that are done are skipped"
        )
    options = [f"--{name.replace('_', '-')}={params[name]}" for name in _OPTIONS if params.get(name) is not None]
    options += [f"--mem={params['mem_gb']}G"] if params.get("mem_gb") else []
    request = ["--test-only", f"--time={params['timeout_min']}", f"--array=0-{tasks - 1}", *options]
    tested = _call("sbatch", *request, "--output=/dev/null", "--wrap=true")
    if tested.returncode:
        said = tested.stderr.strip().splitlines()[-1]
        keys = next((keys for words, keys in _REMEDIES if words in said.lower()), "the keys of cluster")
        raise UserError(f"SLURM would not take {' '.join(options)}: {said}; see {keys}")


def _check_partition(params: Mapping[str, Any]) -> None:
    rows = [line.split("|") for line in _ask("sinfo", "--noheader", "--format=%P|%a|%l|%D").splitlines()]
    names = [row[0].rstrip("*") for row in rows]
    default = next((row[0][:-1] for row in rows if row[0].endswith("*")), None)
    wanted = params.get("partition") or os.environ.get("SBATCH_PARTITION") or default
    if wanted is None:
        raise UserError(f"this cluster has no default partition; set cluster.partition to one of {', '.join(names)}")
    if wanted not in names:
        close = difflib.get_close_matches(wanted, names, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"cluster.partition={wanted} does not exist here; legal: {', '.join(names)}{meant}")
    mine = [row for row in rows if row[0].rstrip("*") == wanted]
    if all(row[1] != "up" for row in mine):
        raise UserError(f"cluster.partition={wanted} is {mine[0][1]}; choose another of {', '.join(names)}")
    limit_min = _read_minutes(mine[0][2])
    if limit_min is not None and params["timeout_min"] > limit_min:
        raise UserError(
            f"cluster.time={params['timeout_min']} minutes is more than cluster.partition={wanted} allows; "
            f"set cluster.time={limit_min} or less: what is not finished by then goes back into the queue and continues"
        )
    nodes = sum(int(row[3]) for row in mine)
    if params["nodes"] > nodes:
        raise UserError(f"cluster.nodes={params['nodes']}, but cluster.partition={wanted} has {nodes}")


def _read_minutes(limit: str) -> int | None:
    """Minutes of a time limit as sinfo writes it (days-hours:minutes:seconds); None: there is none.

    >>> _read_minutes("1-02:03:04"), _read_minutes("30:00"), _read_minutes("infinite")
    (1563, 30, None)
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", limit)
    if found is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes


def read_states(array_id: str) -> dict[str, str]:
    """The state of each task that SLURM remembers, by ``<array>_<index>``; of a lone job by its number.

    A task that waits has the reason behind its state: ``PENDING (Resources)``. Empty when SLURM has forgotten the
    array. Errors: ``UserError`` when it does not answer.
    """
    done = _call("squeue", "--noheader", "--array", "--states=all", f"--jobs={array_id}", "--format=%F_%K %T (%r)")
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise UserError(f"squeue does not answer: {done.stderr.strip()}")
    rows = (line.replace("_N/A", "").replace(" (None)", "").split(maxsplit=1) for line in done.stdout.splitlines())
    return {task: state if state.startswith("PENDING") else state.split()[0] for task, state in rows}


def cancel_waiting(array_id: str) -> None:
    """End the tasks that wait, those that were put back into the queue too; those that run go on.

    Errors: ``UserError`` when SLURM does not answer.
    """
    _ask("scancel", "--state=PENDING", array_id)
