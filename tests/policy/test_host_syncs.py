"""Nothing on the GPU path waits for the device: no value is fetched, no shape depends on data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.policy.sources import PACKAGE, module_name

GPU_MODULES = sorted((PACKAGE / "kernels" / "triton").rglob("*.py"))
METHODS = {"item", "cpu", "numpy", "tolist", "synchronize", "any", "all"}  # any and all end in an `if`
SHAPES_FROM_DATA = {
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}
CONVERSIONS = {"int", "float", "bool"}  # of a tensor they fetch it
LEGAL = {"float(decay)", "float('inf')"}  # a number from the configuration, and a constant


def find_syncs(source: str) -> list[str]:
    """Calls in ``source`` that wait for a GPU, as they are written."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function, written = node.func, ast.unparse(node)
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        moves = name == "to" and "'cpu'" in written
        one_sided_where = name == "where" and len(node.args) == 1
        fetches = isinstance(function, ast.Name) and name in CONVERSIONS and written not in LEGAL
        if name in METHODS | SHAPES_FROM_DATA or moves or one_sided_where or fetches:
            found.append(written)
    return found


@pytest.mark.parametrize("path", GPU_MODULES, ids=module_name)
def test_no_module_of_the_gpu_path_waits(path: Path) -> None:
    assert find_syncs(path.read_text()) == []


def test_there_is_a_gpu_path() -> None:
    assert len(GPU_MODULES) > 5


@pytest.mark.parametrize(
    "source",
    [
        "x.sum().item()",
        "x.cpu()",
        "x.to('cpu')",
        "x.nonzero()",
        "torch.nonzero(x)",
        "torch.where(x)",
        "int(x.sum())",
        "x[mask.any()]",
        "torch.cuda.synchronize()",
        "x.unique()",
    ],
)
def test_a_wait_is_found(source: str) -> None:
    assert find_syncs(source)


@pytest.mark.parametrize("source", ["x.to(device)", "torch.where(x, 1, 0)", "x.sum(dim=1)", "float(decay)"])
def test_what_does_not_wait_is_legal(source: str) -> None:
    assert find_syncs(source) == []
