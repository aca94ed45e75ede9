"""How the kernels are launched: production block sizes, options and the checks on their arguments.

The block sizes stand here alone; launchers, compile check and table of resources read them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tagc.codec.hashing import HASH_ROWS, HashTable, SketchLayout
from tagc.errors import UserError

ELEMENT_TILE = 2048  # elements of a pass over a shard; a multiple of 8, so that a byte of an index has one writer
SAMPLE_TILE = 512  # sampled positions in one program
CELL_TILE_ELEMENTS = 1024  # cells x lanes summed by one program
PEEL_WORDS = 512  # words of bits in one program that looks for pure cells
PEEL_BYTES = 256  # bytes of bits in one program that takes values; a thread takes those of its bytes in turn
LAUNCHED_ROUNDS = 12  # rounds of peeling over the whole device; a load of 0.7 needs 12
COLUMN_TILE = 1024  # rows, or cells, that a column's own program handles at a time
BLOCKS_TILE = 2048  # elements of quantised blocks in one program, if a block is no larger
LARGEST_BLOCK = 8192  # elements of a quantised block

# Multiplications and additions are rounded apart, as in PyTorch, unless a kernel asks for a fused one by name.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
COLUMN_OPTIONS = OPTIONS | {"num_warps": 16}  # few programs, long loops

STATE_DTYPES = (torch.float32, torch.bfloat16)
WIRE_DTYPES = (torch.float32, torch.bfloat16)


# Whether kernels run in Triton's interpreter, on CPU tensors: decided when they are defined.
INTERPRETED: bool = triton.knobs.runtime.interpret

Check = tuple[Tensor, tuple[torch.dtype, ...], tuple[int, ...]]  # an argument, its legal dtypes, its shape


def explain_unusable(device: torch.device) -> str | None:
    """Why the kernels cannot run on ``device``; None if they can."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"kernels=triton needs a GPU, and the tensors are on {device}; choose kernels=cpu or reference"
    if device.index not in (None, torch.cuda.current_device()):
        return (
            f"kernels=triton launches on cuda:{torch.cuda.current_device()}, not {device}; call torch.cuda.set_device"
        )
    if torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
        return (
            f"kernels=triton needs an A100 or newer, not {torch.cuda.get_device_name(device)}; choose kernels=reference"
        )
    return None


def check_tensors(**tensors: Check) -> None:
    """Check device, dtype, shape and layout of a launcher's arguments, the first of which names the device.

    Errors: ``UserError`` naming the argument. A kernel reads memory by arithmetic, so a wrong layout would be read
    silently. Host syncs: none.
    """
    first = next(iter(tensors.values()))[0].device
    reason = explain_unusable(first)
    if reason:
        raise UserError(reason)
    for name, (tensor, dtypes, shape) in tensors.items():
        if tensor.device != first:
            raise UserError(f"{name} is on {tensor.device} and other arguments are on {first}; move it")
        if tensor.dtype not in dtypes:
            names = " or ".join(map(str, dtypes))
            raise UserError(f"{name} has dtype {tensor.dtype}, which kernels=triton does not support; pass {names}")
        if tuple(tensor.shape) != shape:
            raise UserError(f"{name} has shape {tuple(tensor.shape)} where {shape} is expected")
        if not tensor.is_contiguous():
            raise UserError(f"{name} is not contiguous; pass {name}.contiguous()")


def name_table(layout: SketchLayout, table: HashTable) -> dict[str, Check]:
    """A hash table's tensors as arguments of :func:`check_tensors`."""
    depth = -(-layout.rows // layout.cells)
    return {
        "table.cell_HR": (table.cell_HR, (torch.int64,), (HASH_ROWS, layout.rows)),
        "table.sign_HR": (table.sign_HR, (torch.float32,), (HASH_ROWS, layout.rows)),
        "table.rows_HCK": (table.rows_HCK, (torch.int64,), (HASH_ROWS, layout.cells, depth)),
    }


def check_numel(numel: int) -> None:
    """Errors: ``UserError`` unless positions in a shard of ``numel`` elements fit an int32."""
    if not 1 <= numel <= torch.iinfo(torch.int32).max:
        raise UserError(f"a shard of {numel} elements: kernels=triton takes 1 to 2**31 - 1; shard over more ranks")


def threshold_stride(threshold: Tensor, ranks: int) -> int:
    """Elements from one shard's threshold to the next: 0 where one stands for all."""
    if threshold.numel() not in (1, ranks):
        raise UserError(f"threshold has {threshold.numel()} elements for {ranks} shards; pass one, or one per shard")
    return 0 if threshold.numel() == 1 else 1


def check_wire(wire_dtype: torch.dtype) -> None:
    """Errors: ``UserError`` unless values can travel in ``wire_dtype``."""
    if wire_dtype not in WIRE_DTYPES:
        raise UserError(f"wire_dtype={wire_dtype} is not supported by kernels=triton; choose float32 or bfloat16")
