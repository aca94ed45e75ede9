"""Files of either format read as one array."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagc.data import DataInfo, Tokens, open_tokens
from tagc.data.formats import inspect_file
from tagc.data.info import fingerprint_contents
from tagc.data.tokens import write_tokens
from tagc.errors import UserError
from tests.data.conftest import write_raw, write_shard


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three files of both formats, and the array that they hold together."""
    folder, ids = tmp_path_factory.mktemp("mixed"), np.arange(40000, 40023)
    files = [
        write_shard(folder / "a", ids[:7]),
        write_raw(folder / "b", ids[7:8]),
        write_shard(folder / "c", ids[8:]),
    ]
    return Tokens(files), ids


@given(st.tuples(st.integers(0, 23), st.integers(0, 23)).filter(lambda pair: sum(pair) <= 23))
def test_any_range_reads_like_one_array(mixed, pair):
    tokens, ids = mixed
    start, length = pair
    piece = tokens.read(start, length)
    assert piece.dtype == np.int64
    np.testing.assert_array_equal(piece, ids[start : start + length])


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 24), (23, 1), (5, -1)])
def test_range_outside_is_refused(mixed, start, length):
    with pytest.raises(IndexError):
        mixed[0].read(start, length)


def test_docstring_example(tmp_path):
    tokens = Tokens([write_raw(tmp_path / "a", [5, 6, 7]), write_raw(tmp_path / "b", [8, 9])])
    assert len(tokens) == 5
    assert tokens.read(1, 3).tolist() == [6, 7, 8]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\1\0\2", "odd number"),
        (b"\1", "odd number"),
    ],
)
def test_bad_raw_file(tmp_path, content, message):
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        inspect_file(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"count": 4}, "promises 4 tokens but the file holds 3"),
        ({"count": 2}, "promises 2 tokens but the file holds 3"),
        ({"count": -1}, "promises -1 tokens"),
        ({"version": 2}, "version 2"),
    ],
)
def test_bad_shard(tmp_path, lie, message):
    path = write_shard(tmp_path / "x_train_0.bin", [1, 2, 3], **lie)
    with pytest.raises(UserError, match=message) as error:
        inspect_file(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size_bytes", [12, 500, 1023, 1025, 1029])
def test_truncated_shard(tmp_path, size_bytes):
    path = write_shard(tmp_path / "x_train_0.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:size_bytes])
    with pytest.raises(UserError, match=r"promises 3 tokens.*copy it again"):
        inspect_file(path)


def test_shard_without_tokens_and_missing_file(tmp_path):
    with pytest.raises(UserError, match="empty"):
        inspect_file(write_shard(tmp_path / "x_train_0.bin", []))
    with pytest.raises(UserError, match=r"absent\.bin: No such file.*data\.path"):
        inspect_file(tmp_path / "absent.bin")
    with pytest.raises(UserError, match="no token files"):
        Tokens([])


@pytest.mark.parametrize("ids", [[65536], [-1], [3, 70000]])
def test_ids_beyond_uint16_never_wrap(tmp_path, ids):
    with (tmp_path / "x").open("wb") as file, pytest.raises(OverflowError):
        write_tokens(file, ids)


def make_info(tmp_path) -> DataInfo:
    train, val = write_raw(tmp_path / "train.bin", range(9)), write_raw(tmp_path / "val.bin", range(4))
    return DataInfo((str(train),), (str(val),), 9, 9, 4, "f", "d")


def test_open_tokens_by_split(tmp_path):
    info = make_info(tmp_path)
    assert [len(open_tokens(info, split)) for split in ("train", "val")] == [9, 4]
    assert open_tokens(info, "train").fingerprint == "f"
    with pytest.raises(UserError, match="test"):
        open_tokens(info, "test")
    with pytest.raises(UserError, match=r"9 tokens, but 10 when"):
        open_tokens(replace(info, train_tokens=10), "train")


def test_info_survives_json(tmp_path):
    info = make_info(tmp_path)
    assert DataInfo(**json.loads(json.dumps(asdict(info)))) == info


def test_fingerprint_tells_splits_and_order_apart():
    prints = {
        fingerprint_contents(*args) for args in ((["a"], ["b"]), (["b"], ["a"]), (["a", "b"], []), (["b", "a"], []))
    }
    assert len(prints) == 4
