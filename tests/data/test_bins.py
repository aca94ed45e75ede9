"""The user's own token files: both formats, and everything that can be wrong with them."""

import json
import os
import pickle

import pytest

from tagc.config import DataConfig
from tagc.data import open_tokens, prepare
from tagc.data.bins import find_token_files
from tagc.errors import UserError
from tests.data.conftest import write_raw, write_shard


def make_config(path, vocab_size=100) -> DataConfig:
    return DataConfig(name="bin", path=str(path), vocab_size=vocab_size)


@pytest.fixture
def folder(tmp_path):
    """train.bin with ids 0..49, val.bin with ids 90..99."""
    result = tmp_path / "data"
    result.mkdir()
    write_raw(result / "train.bin", range(50))
    write_raw(result / "val.bin", range(90, 100))
    return result


def test_nanogpt_folder(folder):
    info = prepare(make_config(folder))
    assert (info.train_tokens, info.val_tokens, info.vocab_size) == (50, 10, 100)
    assert open_tokens(info, "train").read(48, 2).tolist() == [48, 49]
    assert open_tokens(info, "val").read(0, 2).tolist() == [90, 91]
    assert str(folder) in info.description


def test_shards_of_a_folder_or_prefix(tmp_path):
    for i in (1, 0):
        write_shard(tmp_path / f"web_train_{i:06d}.bin", range(10 * i, 10 * i + 10))
    write_shard(tmp_path / "web_val_000000.bin", range(7))
    for path in (tmp_path, tmp_path / "web"):
        info = prepare(make_config(path))
        assert (info.train_tokens, info.val_tokens) == (20, 7)
        assert open_tokens(info, "train").read(0, 20).tolist() == list(range(20))
    with pytest.raises(UserError, match="neither a folder nor the prefix"):
        prepare(make_config(tmp_path / "we"))


def test_prefix_of_whole_files(tmp_path):
    write_raw(tmp_path / "x_train.bin", range(5))
    write_raw(tmp_path / "x_val.bin", range(4))
    assert prepare(make_config(tmp_path / "x")).train_tokens == 5


def test_brackets_in_a_folder_name_are_not_a_pattern(tmp_path):
    folder = tmp_path / "data[1]"
    folder.mkdir()
    write_shard(folder / "a_train_0.bin", [1])
    assert find_token_files(folder) == ([folder / "a_train_0.bin"], [])


def test_relative_path_becomes_absolute(folder, monkeypatch):
    """Ranks may run in another working directory."""
    monkeypatch.chdir(folder.parent)
    assert prepare(make_config("data")).train_files == (str(folder / "train.bin"),)


def test_fingerprint_follows_contents_not_place(folder, tmp_path):
    before = prepare(make_config(folder)).fingerprint
    moved = folder.rename(tmp_path / "moved")
    assert prepare(make_config(moved)).fingerprint == before
    write_raw(moved / "train.bin", [1, *range(1, 50)])
    assert prepare(make_config(moved)).fingerprint != before


def test_tokens_beyond_the_vocabulary(folder):
    with pytest.raises(UserError, match=r"val\.bin holds the token id 99, but data\.vocab_size=99; .* 100 or more"):
        prepare(make_config(folder, vocab_size=99))
    assert prepare(make_config(folder, vocab_size=100)).vocab_size == 100


def test_shard_header_is_not_taken_for_tokens(tmp_path):
    write_shard(tmp_path / "x_train_0.bin", [3])
    write_shard(tmp_path / "x_val_0.bin", [2])
    assert prepare(make_config(tmp_path, vocab_size=4)).train_tokens == 1
    with pytest.raises(UserError, match="token id 3"):
        prepare(make_config(tmp_path, vocab_size=3))


def test_scan_is_kept_but_never_stale(folder, cache_home, monkeypatch):
    prepare(make_config(folder))
    assert len(list((cache_home / "tagc" / "scans").iterdir())) == 2
    monkeypatch.setattr("tagc.data.bins._scan_file", lambda *_: pytest.fail("scanned again"))
    prepare(make_config(folder))
    monkeypatch.undo()
    os.environ["XDG_CACHE_HOME"] = str(cache_home)
    stat = (folder / "val.bin").stat()
    write_raw(folder / "val.bin", [60000] * 10)  # same size; and give it the old modification time
    os.utime(folder / "val.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match="60000"):
        prepare(make_config(folder))


def test_damaged_or_unwritable_sidecar_only_costs_time(folder, cache_home, caplog):
    prepare(make_config(folder))
    for sidecar in (cache_home / "tagc" / "scans").iterdir():
        sidecar.write_text("{")
    assert prepare(make_config(folder)).train_tokens == 50
    os.environ["XDG_CACHE_HOME"] = str(folder / "val.bin")  # a file, not a folder
    with caplog.at_level("INFO", "tagc"):
        assert prepare(make_config(folder)).train_tokens == 50
    assert "repeated next time" in caplog.text


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"abc", "odd number"), (None, "no .*found")])
def test_bad_file_is_named(folder, name, content, message):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        prepare(make_config(folder))
    assert name in str(error.value)


def test_missing_path(tmp_path):
    with pytest.raises(UserError, match=r"data\.path is not set"):
        prepare(DataConfig(name="bin"))
    with pytest.raises(UserError, match=r"nowhere is neither a folder nor the prefix"):
        prepare(make_config(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no train\.bin"):
        prepare(make_config(tmp_path))


def test_two_kinds_in_one_folder(folder):
    write_shard(folder / "x_train_0.bin", [1])
    with pytest.raises(UserError, match="both"):
        prepare(make_config(folder))


def test_no_pickle_is_loaded(folder):
    """nanoGPT leaves a meta.pkl beside its files; loading it would run this."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(folder / "exploded"),)

    (folder / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    prepare(make_config(folder))
    assert not (folder / "exploded").exists()


def test_damaged_manifest(folder):
    (folder / "manifest.json").write_text(json.dumps({"files": {}}))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        prepare(make_config(folder))


def test_unknown_name():
    with pytest.raises(UserError, match=r"data\.name=wikitext is unknown; legal: pystdlib, .*bin"):
        prepare(DataConfig(name="wikitext"))
