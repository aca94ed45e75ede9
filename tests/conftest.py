"""Settings that must be in place before anything else is imported."""

import os

# Several test processes share the cores; ranks get their number of threads from the launcher.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tagc.host.device import count_cores

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, and parts of torch import it: kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_xdist_auto_num_workers() -> int:
    """One and a half times the cores: a worker waits for other processes, timers and SLURM nearly half its time."""
    return max(2, count_cores() * 3 // 2)
