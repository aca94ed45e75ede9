"""Which device the ranks use, decided in this one place, and how many cores they share."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tagc.errors import UserError

log = logging.getLogger(__name__)


def count_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The cores that this process may use: its affinity, or a container's CPU quota (cgroup v1 and v2) if smaller.

    cgroups: where they are mounted; own: the file that says in which this process is.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for folder in _own_cgroups(cgroups, own) if (quota := _read_quota(folder))]
    return max(1, min([cores, *quotas]))


def _own_cgroups(root: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's CPU cgroup and of all above it, which limit it, too."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "cpu" if controllers else root  # v2 has one tree and names no controllers
        inside = PurePosixPath(path.lstrip("/"))
        yield from (mount / folder for folder in (inside, *inside.parents))


def _read_quota(folder: Path) -> float | None:
    """Cores that the quota of a cgroup stands for; None without one."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def resolve_device(device: str, ranks: int = 1) -> str:
    """Turn ``cluster.device`` into ``"cpu"`` or ``"cuda"``; every rank on this machine needs a GPU of its own.

    ``auto`` takes CUDA where there are enough GPUs for the ranks, and says so where it found some but too few.

    Errors: ``UserError`` when ``cuda`` is asked for and cannot serve all ranks.
    """
    import torch

    if device == "cpu":
        return "cpu"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        if 0 < gpus < ranks:
            log.warning("cluster.device=auto: %d GPU(s) for cluster.ranks=%d, so the ranks use the CPU", gpus, ranks)
        return "cuda" if gpus >= ranks else "cpu"
    if device != "cuda":
        raise UserError(f"cluster.device={device} is out of range; legal: auto, cpu or cuda")
    if not gpus:
        build = "no GPU is visible to torch" if torch.version.cuda else "this torch is built without CUDA"
        raise UserError(f"cluster.device=cuda, but {build}; set cluster.device=cpu or install a CUDA build of torch")
    if gpus < ranks:
        raise UserError(
            f"cluster.ranks={ranks} needs as many GPUs, but {gpus} can be seen; "
            f"set cluster.ranks={gpus} or cluster.device=cpu"
        )
    return "cuda"
