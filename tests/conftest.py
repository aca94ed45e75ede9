"""Settings that must be in place before anything else is imported."""

import os

# Several test processes share the cores; ranks get their number of threads from the launcher.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, and parts of torch import it: kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
