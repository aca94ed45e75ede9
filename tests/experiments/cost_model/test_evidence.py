"""What the predictions are made from is what the recorded rows say today."""

from __future__ import annotations

from experiments.cost_model.evidence import ROOT, make_files


def test_committed_files_are_those_of_the_committed_rows() -> None:
    """If this fails: python -m experiments.cost_model.evidence"""
    stale = [str(path.relative_to(ROOT)) for path, text in make_files().items() if path.read_text() != text]
    assert stale == []
