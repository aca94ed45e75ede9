"""The Triton backend for tests: on a GPU compiled, elsewhere in Triton's interpreter on CPU tensors.

Triton reads TRITON_INTERPRET when a kernel is defined, its own included, so tests import the backend from here alone.
"""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from tagc.kernels import triton as backend  # noqa: E402
from tagc.kernels.triton import launch, peel  # noqa: E402

__all__ = ["DEVICE", "backend", "launch", "peel"]
