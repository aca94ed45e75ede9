"""All Triton kernels compile for sm_80 and sm_90 without a GPU or spills, and the recorded table is current."""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys

import pytest

from tests.policy.sources import PACKAGE, ROOT

TABLE = ROOT / "experiments" / "kernels" / "triton_resources.csv"
SHARED_BYTES_MAX = 48 * 1024  # what a block may use on every architecture without asking for more


def list_kernels() -> set[str]:
    """Names of the functions under ``@triton.jit`` in the modules of kernels; pieces of kernels lie elsewhere."""
    functions = [
        node
        for path in (PACKAGE / "kernels" / "triton").glob("*_kernels.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    return {f.name for f in functions if any(ast.unparse(d) == "triton.jit" for d in f.decorator_list)}


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, str]]:
    """The table of what is compiled now, in a process of its own: this one may hold interpreted kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_triton"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(done.stdout.splitlines()))


def test_every_kernel_compiles_for_both_architectures(compiled):
    kernels = list_kernels()
    assert len(kernels) > 10
    assert {(row["kernel"], row["architecture"]) for row in compiled} == {
        (kernel, architecture) for kernel in kernels for architecture in ("sm_80", "sm_90")
    }


def test_nothing_spills_or_needs_too_much(compiled):
    assert [row for row in compiled if int(row["spill_bytes"])] == []
    for row in compiled:
        assert int(row["shared_bytes"]) <= SHARED_BYTES_MAX, row
        assert int(row["registers"]) * int(row["warps"]) * 32 <= 65536, row


def test_the_recorded_table_holds_exactly_these_kernels(compiled):
    recorded = list(csv.DictReader(TABLE.read_text().splitlines()))
    keys = ("kernel", "variant", "architecture", "warps")
    assert [[row[key] for key in keys] for row in recorded] == [[row[key] for key in keys] for row in compiled], (
        "record it again: see tests/kernels/compile_triton.py"
    )
    if recorded[0]["triton"] == compiled[0]["triton"]:  # another compiler may use other registers
        assert recorded == compiled


SPILLING = """
from tests.kernels.compile_triton import compile_variant, list_variants, read_usage
from dataclasses import replace
variant = next(v for v in list_variants() if v.kernel.__name__ == "select_packed")
print(read_usage(compile_variant(replace(variant, options=variant.options | {"maxnreg": 24}), 90))["spill_bytes"])
"""


def test_a_spill_would_be_seen():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SPILLING], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
