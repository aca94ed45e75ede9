from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tagc.errors import UserError
from tagc.record.rows import MetricsFile, RowReader, clean_row, cut_rows, load_rows, rewrite_rows


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [{"step": 1, "a": 1.5, "b": None, "c": True, "d": "x"}, {"step": 2, "a": -3}]
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for number, row in enumerate(rows, start=1):
        file.append(clean_row(row))
        assert load_rows(tmp_path / "metrics.jsonl") == rows[:number]  # readable while the run goes on
    file.close()


def test_non_finite_floats_become_null_in_valid_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(clean_row({"step": 1, "a": float("nan"), "b": float("inf"), "c": float("-inf")}))
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse) == {"step": 1, "a": None, "b": None, "c": None}


@pytest.mark.parametrize("step", [None, 1.0, True, "1"])
def test_a_row_needs_an_int_step(step: object) -> None:
    with pytest.raises(TypeError, match="int `step`"):
        clean_row({"step": step, "a": 1})
    with pytest.raises(TypeError, match="int `step`"):
        clean_row({"a": 1})


@pytest.mark.parametrize("value", [[1], {"b": 1}, np.float32(1.0)])
def test_a_value_that_is_not_flat_is_named(value: object) -> None:
    with pytest.raises(TypeError, match="'peeled'"):
        clean_row({"step": 1, "peeled": value})


@pytest.mark.parametrize("torn", [b'{"step": 3, "trai', b"", b'{"step": 3, "x": "\xc3'])
def test_a_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert load_rows(path) == [{"step": 1}, {"step": 2}]


def test_a_whole_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert load_rows(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("bad", [b'{"step": 2', b"[1, 2]", b"", b"7"])
def test_a_bad_middle_line_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        load_rows(path)


def test_a_bad_last_line_that_was_ended_is_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nrubbish\n')
    with pytest.raises(UserError, match="line 2"):
        load_rows(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        load_rows(tmp_path / "metrics.jsonl")


def test_rewritten_rows_replace_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    rewrite_rows(path, load_rows(path)[:1])
    assert path.read_text() == '{"step": 1}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_wait_for_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch, caplog) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    real, room = file._file, [10]

    class Full:
        """Takes 10 bytes, and then nothing."""

        def write(self, data: bytes) -> int:
            if room[0] == 0:
                raise OSError(28, "No space left on device")
            room[0] = 0
            return real.write(data[:10])

    monkeypatch.setattr(file, "_file", Full())
    for step in (1, 2):
        file.append({"step": step, "train_loss": 0.5})
    assert caplog.text.count("its rows wait in memory") == 1
    monkeypatch.setattr(file, "_file", real)
    file.append({"step": 3, "train_loss": 0.5})
    file.close()
    assert load_rows(tmp_path / "metrics.jsonl") == [{"step": step, "train_loss": 0.5} for step in (1, 2, 3)]


def test_a_growing_file_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert reader.read_new() == []
    for written, read in (
        (b'{"step": 1}\n{"ste', [{"step": 1}]),
        (b'p": 2', []),
        (b"}\n", [{"step": 2}]),
        (b"", []),
    ):
        with path.open("ab") as file:
            file.write(written)
        assert reader.read_new() == read


def test_cutting_rows_takes_a_torn_row_away_even_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert cut_rows(path, 3) == 0 and not path.exists()
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert cut_rows(path, 2) == 2
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(b'{"st')
    assert cut_rows(path, 0) == 0 and path.read_bytes() == b""
