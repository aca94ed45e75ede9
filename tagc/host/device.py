"""Which device the ranks use, decided in this one place, and how many cores they share."""

from __future__ import annotations

import logging
import os

from tagc.errors import UserError

log = logging.getLogger(__name__)


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
