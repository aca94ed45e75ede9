"""The notebooks run from top to bottom; git holds them without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "analysis" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_thin_and_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) <= 12


def test_the_notebooks_run():
    """In one kernel, one after the other: starting it is most of the time."""
    both = nbformat.v4.new_notebook()
    for path in NOTEBOOKS:
        both.cells += [nbformat.v4.new_code_cell("%reset -f"), *nbformat.read(path, as_version=4).cells]
    for cell in both.cells:
        cell.id = nbformat.v4.new_code_cell().id
    NotebookClient(both, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in both.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
