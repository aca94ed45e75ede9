"""The built-in data, on a small made-up library; the real one once."""

import errno
import json
import multiprocessing
import os

import pytest
from tokenizers import Tokenizer

from tagc.config import DataConfig
from tagc.data import open_tokens, prepare
from tagc.data.pystdlib import END_OF_TEXT, collect_documents, is_validation, prepare_pystdlib
from tagc.errors import UserError

DOCUMENTS = [(f"pkg/m{i:03d}.py", f"def function_{i}(x):\n    return x * {i} + 'ä€'\n" * 4) for i in range(80)]
VOCAB = 300


def prepare_small(path=None, documents=DOCUMENTS, vocab_size=VOCAB):
    config = DataConfig(path=str(path) if path else None, vocab_size=vocab_size)
    return prepare_pystdlib(config, documents, min_tokens=100)


def decode_split(info, split):
    folder = os.path.dirname(info.train_files[0])
    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    tokens = open_tokens(info, split)
    text = tokenizer.decode(tokens.read(0, len(tokens)).tolist(), skip_special_tokens=False)
    return text.split(END_OF_TEXT)


def test_tokens_decode_to_the_documents(cache_home):
    info = prepare_small()
    assert info.train_files[0].startswith(str(cache_home / "tagc" / "pystdlib-py"))
    for split, wanted in (("train", False), ("val", True)):
        texts = [text for name, text in DOCUMENTS if is_validation(name) == wanted]
        assert len(texts) >= 2
        assert decode_split(info, split) == [*texts, ""]


def test_cache_folder_is_also_a_bin_folder(tmp_path):
    """So that another machine or Python can train on the very same tokens."""
    info = prepare_small(tmp_path)
    folder = os.path.dirname(info.train_files[0])
    assert prepare(DataConfig(name="bin", path=folder, vocab_size=VOCAB)).fingerprint == info.fingerprint


def test_second_call_reads_the_cache(monkeypatch, tmp_path):
    first = prepare_small(tmp_path)
    monkeypatch.setattr("tagc.data.pystdlib.train_bpe", lambda *_: pytest.fail("built again"))
    assert prepare_small(tmp_path) == first


def test_same_documents_give_the_same_bytes(tmp_path):
    one, two = prepare_small(tmp_path / "one"), prepare_small(tmp_path / "two")
    assert one.fingerprint == two.fingerprint
    assert one.train_files != two.train_files


def test_other_documents_or_vocabulary_get_their_own_folder(tmp_path):
    infos = [
        prepare_small(tmp_path),
        prepare_small(tmp_path, vocab_size=VOCAB + 1),
        prepare_small(tmp_path, documents=[*DOCUMENTS, ("z.py", "z = 1\n")]),
    ]
    assert len({info.train_files for info in infos}) == 3


def truncate(folder):
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(data[:-2])


def flip(folder):
    data = bytearray((folder / "val.bin").read_bytes())
    data[10] ^= 1
    (folder / "val.bin").write_bytes(data)


DAMAGE = {
    "train.bin has": truncate,
    "val.bin does not match its sha256": flip,
    "val.bin is missing": lambda folder: (folder / "val.bin").unlink(),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json or": lambda folder: (folder / "manifest.json").write_text("{"),
    "lists no files": lambda folder: (folder / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_cache_is_rebuilt(tmp_path, caplog, message):
    first = prepare_small(tmp_path)
    (folder,) = tmp_path.glob("pystdlib-*-*[!k]")
    DAMAGE[message](folder)
    assert prepare_small(tmp_path) == first
    assert message in caplog.text and "building it again" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert decode_split(first, "val")[-1] == ""


def test_leftovers_of_a_killed_build_are_replaced(tmp_path):
    info = prepare_small(tmp_path)
    (folder,) = tmp_path.glob("pystdlib-*-*[!k]")
    folder.rename(f"{folder}.building")
    (tmp_path / f"{folder.name}.building" / "train.bin").write_bytes(b"half")
    assert prepare_small(tmp_path) == info
    assert not (tmp_path / f"{folder.name}.building").exists()


def _prepare_in_process(path, barrier, queue):
    barrier.wait()
    queue.put(prepare_small(path))


def test_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_prepare_in_process, args=(tmp_path, barrier, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join(timeout=300)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert results[0] == results[1] == prepare_small(tmp_path)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the token cache in .*file.*XDG_CACHE_HOME or data\.path"):
        prepare_small(tmp_path / "file")


def test_full_disk(tmp_path, monkeypatch):
    def fail(file, ids):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tagc.data.pystdlib.write_tokens", fail)
    with pytest.raises(UserError, match=r"No space left on device; set XDG_CACHE_HOME or data\.path"):
        prepare_small(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] in ([".lock"], [])


def test_complete_cache_needs_no_write_access(tmp_path, monkeypatch):
    info = prepare_small(tmp_path)
    monkeypatch.setattr("tagc.data.cache.FileLock", lambda *_, **__: pytest.fail("locked"))
    assert prepare_small(tmp_path) == info


def test_library_without_sources(tmp_path):
    with pytest.raises(UserError, match=r"only 0 training .*comes without its library's sources.*data=bin"):
        prepare_pystdlib(DataConfig(path=str(tmp_path)), [])
    with pytest.raises(UserError, match=r"at least 200,000"):
        prepare_pystdlib(DataConfig(path=str(tmp_path), vocab_size=VOCAB), DOCUMENTS)


def test_vocabulary_smaller_than_bytes(tmp_path):
    with pytest.raises(UserError, match=r"data\.vocab_size=256 .* at least 257"):
        prepare_small(tmp_path, vocab_size=256)
    assert prepare_small(tmp_path, vocab_size=257).vocab_size == 257


def test_collecting_sources(tmp_path):
    files = {
        "b.py": b"b = 1\n",
        "a/x.py": b"x = 1\n",
        "a/same.py": b"x = 1\n",
        "a/empty.py": b"\n",
        "a/latin.py": b"# \xe9\n",
        "a/data.txt": b"no\n",
        "site-packages/p.py": b"p = 1\n",
        "a/dist-packages/q.py": b"q = 1\n",
        "__pycache__/r.py": b"r = 1\n",
        "encodings/cp1.py": b"t = 1\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert collect_documents(tmp_path) == [("a/same.py", "x = 1\n"), ("b.py", "b = 1\n")]


def test_parallelism_variable_is_left_safe_for_forks(tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    prepare_small(tmp_path / "a")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    prepare_small(tmp_path / "b")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_the_real_library(cache_home):
    info = prepare(DataConfig())
    total = info.train_tokens + info.val_tokens
    (manifest,) = cache_home.glob("tagc/*/manifest.json")
    assert json.loads(manifest.read_text())["tokens"] == {"train": info.train_tokens, "val": info.val_tokens}
    assert total > 2_000_000  # about 8.8 M; distributions that leave out the `test` package have about 3 M
    assert 0.01 < info.val_tokens / total < 0.08
    assert open_tokens(info, "train").read(0, 10**6).max() < 4096
