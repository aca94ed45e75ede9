"""Rows are on the disk as soon as they are measured."""

from __future__ import annotations

import pytest

from experiments.rows import append_row, write_rows


def test_a_row_is_written_before_the_next_is_measured(tmp_path):
    path = tmp_path / "rows.csv"

    def measure():
        yield {"arm": "fsdp", "ms": 1.5}
        assert path.read_text() == "arm,ms\nfsdp,1.5\n"
        yield {"arm": "bf16", "ms": 1}

    write_rows(path, measure())
    assert path.read_text() == "arm,ms\nfsdp,1.5\nbf16,1\n"
    append_row(path, {"arm": "tagc", "ms": 2}, ("arm", "ms"))
    assert path.read_text().endswith("bf16,1\ntagc,2\n")


def test_a_header_comes_once_and_a_foreign_column_is_refused(tmp_path, capsys):
    write_rows(None, [], ("arm", "ms"))
    assert capsys.readouterr().out == "arm,ms\n"
    for arm in ("fsdp", "bf16"):
        append_row(tmp_path / "rows.csv", {"arm": arm}, ("arm",))
    assert (tmp_path / "rows.csv").read_text() == "arm\nfsdp\nbf16\n"
    with pytest.raises(ValueError, match="ms"):
        append_row(tmp_path / "rows.csv", {"arm": "fsdp", "ms": 1}, ("arm",))
