"""Tensors as numpy arrays without copies, or an error that says what does not fit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.codec.hashing import HashTable, SketchLayout

LARGEST_INT32 = torch.iinfo(torch.int32).max
MAX_SHARE = 255  # rows in one cell are counted in a byte


def as_array(tensor: Tensor, name: str, *dtypes: torch.dtype) -> np.ndarray:
    """The tensor's memory as an array; bfloat16 becomes its uint16 bits.

    Errors: ``ValueError`` for another device, another dtype than ``dtypes``, or a tensor that is not contiguous.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"kernels=cpu works on CPU tensors, {name} is on {tensor.device}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"kernels=cpu needs {name} as {expected}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"kernels=cpu needs {name} contiguous, got strides {tensor.stride()}")
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


def float_array(tensor: Tensor, name: str) -> np.ndarray:
    """float32 memory as an array."""
    return as_array(tensor, name, torch.float32)


def state_array(tensor: Tensor, name: str) -> np.ndarray:
    """float32 or bfloat16 memory as an array."""
    return as_array(tensor, name, torch.float32, torch.bfloat16)


def byte_array(tensor: Tensor, name: str) -> np.ndarray:
    """uint8 memory as an array."""
    return as_array(tensor, name, torch.uint8)


def threshold_array(threshold_W1: Tensor, ranks: int) -> np.ndarray:
    """One float32 threshold per shard, from [W, 1] or [1]."""
    return float_array(threshold_W1.reshape(-1).expand(ranks).contiguous(), "threshold")


def check_shards(gradient_WN: Tensor, state_WN: Tensor, numel: int) -> None:
    """Errors: ``ValueError`` unless both are [W, numel], and positions fit an int32."""
    check_numel(numel)
    if gradient_WN.dim() != 2 or gradient_WN.shape[1] != numel or state_WN.shape != gradient_WN.shape:
        shapes = f"{tuple(gradient_WN.shape)} and {tuple(state_WN.shape)}"
        raise ValueError(f"gradient and residual must both be [ranks, {numel}], got {shapes}")


def check_numel(numel: int) -> None:
    """Errors: ``ValueError`` for more elements than an int32 can count."""
    if numel > LARGEST_INT32:
        raise ValueError(f"{numel} elements in one shard are more than an int32 can count; shard over more ranks")


def check_layout(layout: SketchLayout, table: HashTable) -> None:
    """Errors: ``ValueError`` for a layout that the cell counters cannot hold, or a table of another layout."""
    check_numel(layout.numel)
    if table.rows_HCK.shape[2] > MAX_SHARE:
        rows = table.rows_HCK.shape[2]
        raise ValueError(f"kernels=cpu counts at most {MAX_SHARE} rows per cell, got {rows}; lower compressor.ratio")
    if table.cell_HR.shape[1] != layout.rows or table.rows_HCK.shape[1] != layout.cells:
        raise ValueError(f"the hash table is for another layout than {layout}")


def pad_lanes(lanes: int) -> int:
    """Lanes of a row in scratch memory: a whole number of vectors, so that loops over lanes have no tail."""
    return lanes if lanes == 1 else -(-lanes // 16) * 16


def rows_per_tile(lanes: int, elements: int) -> int:
    """Rows in a tile of about ``elements`` elements: a multiple of 8, so that a tile is whole bytes of a bitmap."""
    return max(8, elements // lanes // 8 * 8)
