"""Compile every Triton kernel without a GPU, in its production block sizes, and list what it needs.

    python -m tests.kernels.compile_triton                                              # print the table
    python -m tests.kernels.compile_triton > experiments/kernels/triton_resources.csv   # record it

One row per kernel, variant and architecture: warps, registers per thread, shared memory, and bytes of stack per thread,
which is where registers spill to. Must not run under TRITON_INTERPRET.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tagc.codec.hashing import SketchLayout, plan_layout
from tagc.kernels.triton import (
    delta,
    delta_kernels,
    launch,
    packed_kernels,
    peel,
    peel_kernels,
    quantize,
    quantize_kernels,
    sample_kernels,
    sketch,
)
from tagc.kernels.triton import sketch_kernels as encoder

ARCHITECTURES = (80, 90)
COLUMNS = ("kernel", "variant", "architecture", "warps", "registers", "shared_bytes", "spill_bytes", "triton")
WIDE, NARROW = plan_layout(4_700_000, 2.0), plan_layout(300_000, 2.0)  # 251 and 13 lanes

INTEGERS = ("rank", "ranks", "numel", "index_bytes", "code_bytes", "scales", "capacity", "threshold_stride")
INTEGERS += ("sample", "rows", "cells", "all_cells", "depth", "max_rounds")
POINTERS = {"owed": "u8", "index": "u8", "peers": "u8", "open": "u8", "pure": "u8", "unresolved": "u8", "codes": "u8"}
POINTERS |= {
    "kept": "i32",
    "count": "i32",
    "union": "i32",
    "end": "i64",
    "rows": "i64",
    "cell": "i64",
    "position": "i64",
}
STATE_AND_WIRE = ("carry", "residual", "state", "cells", "values")  # fp32 unless a variant says otherwise


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: dtypes by argument (the others as usual) and constants."""

    kernel: Any
    name: str
    constants: dict[str, Any]
    dtypes: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: launch.OPTIONS)
    multiples: tuple[str, ...] = ()  # integers that are multiples of 16, which lets loads be wide


def list_variants() -> Iterator[Variant]:
    """Every kernel with all its features on: state and wire in bf16 or fp32, rows aligned or not, many lanes or few."""
    tile, add = {"TILE": launch.ELEMENT_TILE}, {"HAS_DECAY": True, "ERROR_FEEDBACK": True}
    aligned = ("numel", "index_bytes", "code_bytes", "capacity")
    for dtype, wire, multiples in (
        ("fp32", tl.float32, aligned),
        ("bf16", tl.bfloat16, aligned),
        ("bf16", tl.bfloat16, ()),
    ):
        rest = (dict.fromkeys(STATE_AND_WIRE, dtype), launch.OPTIONS, multiples)
        name = dtype if multiples else f"{dtype} unaligned"
        yield Variant(encoder.select_sketch, name, add | tile | {"STORE_X": dtype == "bf16"}, *rest)
        yield Variant(packed_kernels.select_packed, name, add | tile | {"WIRE": wire}, *rest)
        if dtype == "bf16":
            yield Variant(encoder.add_owed, name, tile, *rest)
            gather = {"HAS_DECAY": True, "HAS_OWED": True, "TILE": launch.SAMPLE_TILE}
            yield Variant(sample_kernels.gather_sample, name, gather, *rest)
            yield Variant(packed_kernels.place_packed, name, tile, *rest)
            yield Variant(packed_kernels.add_packed, name, tile, *rest)
            yield from list_quantising(name, rest)
            yield from list_differences(name, multiples)
    yield Variant(packed_kernels.count_index, "", {"BYTES": launch.ELEMENT_TILE // 8})
    for layout in (WIDE, NARROW):
        yield from list_sketching(layout)


def list_quantising(name: str, rest: tuple[dict[str, str], dict[str, Any], tuple[str, ...]]) -> Iterator[Variant]:
    """The kernels of block quantisation."""
    for bits in (8, 4):
        cut = {"BITS": bits, "BLOCK": 256}
        sizes = cut | {"HAS_DECAY": True, "BLOCKS": quantize.blocks_per_program(256)}
        yield Variant(quantize_kernels.quantize, f"{name} {bits} bits", sizes, *rest)
        yield Variant(quantize_kernels.add_blocks, f"{name} {bits} bits", cut | {"TILE": launch.ELEMENT_TILE}, *rest)


def list_differences(name: str, multiples: tuple[str, ...]) -> Iterator[Variant]:
    """The kernels of weight differences: codes that share bytes, and a rotation in the usual and the largest block."""
    dtypes = dict.fromkeys(("target", "replica", "scales"), "bf16")
    for bits, block, rotate in ((4, 256, False), (3, 256, True), (2, launch.LARGEST_BLOCK, True)):
        constants = delta.list_constants(bits, block, rotate)
        for kernel in (delta_kernels.subtract_and_round, delta_kernels.add_differences):
            variant = f"{name} {bits} bits{f' rotated in {block}' if rotate else ''}"
            yield Variant(kernel, variant, constants, dtypes, launch.OPTIONS, multiples)


def list_sketching(layout: SketchLayout) -> Iterator[Variant]:
    """The kernels that depend on the layout of a sketch."""
    name, width = f"{layout.lanes} lanes", peel.row_bytes(layout.lanes)
    cell_tile, lanes = sketch.lane_tile(layout)
    gather = {"LANES": layout.lanes, "LANE_TILE": lanes, "CELL_TILE": cell_tile}
    yield Variant(encoder.gather_cells, name, gather, {"cells": "bf16"})
    words, word = (width // 4, "i32") if width >= 4 else (width, "u8")
    pure = {"WORDS": words, "CELL_TILE": launch.PEEL_WORDS // words}
    yield Variant(peel_kernels.find_pure, name, pure, {"open": word, "pure": word})
    sizes = {"LANES": layout.lanes, "ROW_BYTES": width}
    for kernel in (peel_kernels.spread_index, peel_kernels.peel_rows, peel_kernels.estimate_rows):
        yield Variant(kernel, name, sizes | {"ROW_TILE": launch.PEEL_BYTES // width})
    yield Variant(peel_kernels.peel_columns, name, sizes | {"TILE": launch.COLUMN_TILE}, {}, launch.COLUMN_OPTIONS)
    yield Variant(peel_kernels.finish_peeling, name, sizes | {"ESTIMATE": True, "TILE": launch.ELEMENT_TILE})


def compile_variant(variant: Variant, architecture: int) -> Any:
    """Compile as a launch would: tensors start at multiples of 16 bytes, as PyTorch allocates them."""
    signature, aligned = {}, {}
    for position, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
        elif name in INTEGERS:
            signature[name] = "i32"
            if name in variant.multiples:
                aligned[(position,)] = [["tt.divisibility", 16]]
        elif name in ("decay", "factor"):
            signature[name] = "fp32"
        else:
            stem = name.removesuffix("_ptr")
            signature[name] = "*" + variant.dtypes.get(stem, POINTERS.get(stem, "fp32"))
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=variant.options)


def read_usage(compiled: Any) -> dict[str, int]:
    """Registers and stack of the machine code, from the cuobjdump that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": used["REG"], "spill_bytes": used["STACK"] + used["LOCAL"]}


def list_rows() -> Iterator[dict[str, Any]]:
    """The table's rows."""
    for variant in list_variants():
        for architecture in ARCHITECTURES:
            compiled = compile_variant(variant, architecture)
            yield {
                "kernel": variant.kernel.__name__,
                "variant": variant.name,
                "architecture": f"sm_{architecture}",
                "warps": variant.options["num_warps"],
                **read_usage(compiled),
                "shared_bytes": compiled.metadata.shared,
                "triton": triton.__version__,
            }


def main() -> None:
    if launch.INTERPRETED:
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    torch.set_num_threads(1)
    table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    table.writeheader()
    for row in list_rows():
        table.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
