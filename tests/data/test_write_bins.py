"""``python -m tagc.data.prepare``: from text to files that ``prepare`` accepts."""

import json
import subprocess
import sys

import pytest

from tagc.config import DataConfig
from tagc.data import open_tokens, prepare
from tagc.data import write_bins as module
from tagc.data.corpora import CORPORA, check_sources, is_validation, load_gpt2_encoder, stream_batches
from tagc.data.prepare.__main__ import main
from tagc.data.write_bins import publish_bins, write_corpus, write_gpt2_bins
from tagc.errors import UserError

TEXT = "To be, or not to be:\nthat is the question.\n" * 30


class CodePoints:
    """An encoder small enough to check by eye."""

    n_vocab = 257
    eot_token = 256

    def encode_ordinary_batch(self, text):
        return [list(one.encode()) for one in text]


@pytest.fixture
def shakespeare(tmp_path):
    source = tmp_path / "input.txt"
    source.write_text(TEXT)
    return source


def read_text(info, split, chars):
    tokens = open_tokens(info, split)
    return "".join(chars[i] for i in tokens.read(0, len(tokens)))


def test_char_corpus_end_to_end(shakespeare, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["shakespeare_char", "--path", str(out), "--source", str(shakespeare)]) == 0
    assert f"data=shakespeare_char data.path={out}" in capsys.readouterr().err.replace("\n", "")
    info = prepare(DataConfig(name="shakespeare_char", path=str(out), vocab_size=65))
    chars = json.loads((out / "manifest.json").read_text())["chars"]
    assert chars == sorted(set(TEXT))
    assert read_text(info, "train", chars) + read_text(info, "val", chars) == TEXT
    assert info.val_tokens == len(TEXT) - int(len(TEXT) * 0.9)
    assert sorted(path.name for path in out.iterdir() if path.name != ".lock") == [
        "manifest.json",
        "train.bin",
        "val.bin",
    ]


def test_default_folder_is_where_prepare_looks(shakespeare):
    config = DataConfig(name="shakespeare_char", vocab_size=65)
    with pytest.raises(UserError, match=r"make them once with: python -m tagc\.data\.prepare shakespeare_char$"):
        prepare(config)
    assert main(["shakespeare_char", "--source", str(shakespeare), "--max-tokens", "500"]) == 0
    info = prepare(config)
    assert info.train_tokens + info.val_tokens == 500


def test_remedy_names_the_configured_path(tmp_path):
    path = tmp_path / "my data"
    with pytest.raises(UserError, match=r"prepare openwebtext --path '.*my data'$"):
        prepare(DataConfig(name="openwebtext", path=str(path), vocab_size=50304))


def test_command_as_a_user_runs_it(shakespeare, tmp_path):
    command = [sys.executable, "-W", "error", "-m", "tagc.data.prepare", "shakespeare_char"]
    command += ["--path", str(tmp_path / "out"), "--source", str(shakespeare)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == 1
    assert "already holds token files" in second.stderr and "Traceback" not in second.stderr


def test_vocabulary_larger_than_configured(shakespeare, tmp_path):
    write_corpus("shakespeare_char", tmp_path / "out", [shakespeare], None, 0.1)
    with pytest.raises(UserError, match=r"data\.vocab_size=3"):
        prepare(DataConfig(name="shakespeare_char", path=str(tmp_path / "out"), vocab_size=3))


def test_prepared_file_that_was_damaged_later(shakespeare, tmp_path):
    out = tmp_path / "out"
    write_corpus("shakespeare_char", out, [shakespeare], None, 0.1)
    (out / "train.bin").write_bytes((out / "train.bin").read_bytes()[:-2])  # even, so only the manifest can tell
    with pytest.raises(UserError, match=r"train\.bin does not match .*manifest\.json"):
        prepare(DataConfig(name="shakespeare_char", path=str(out), vocab_size=65))


def build_gpt2(folder, documents, max_tokens=None, val_frac=0.3):
    batches = [documents[first : first + 7] for first in range(0, len(documents), 7)]
    return write_gpt2_bins(folder, iter(batches), CodePoints(), max_tokens, val_frac)


def test_documents_are_split_whole_and_parted(tmp_path):
    documents = [f"document {i} é" for i in range(50)]
    publish_bins(
        tmp_path, lambda folder: build_gpt2(folder, [*documents, " \n"]), {"name": "openwebtext", "tokenizer": "gpt2"}
    )
    info = prepare(DataConfig(name="openwebtext", path=str(tmp_path), vocab_size=257))
    for split, wanted in (("train", False), ("val", True)):
        tokens = open_tokens(info, split)
        ids = tokens.read(0, len(tokens)).tolist()
        texts = bytes(i if i < 256 else 0 for i in ids).decode().split("\0")
        assert texts == [*(d for d in documents if is_validation(d, 0.3) == wanted), ""]
    with pytest.raises(UserError, match=r"vocab_size=256"):
        prepare(DataConfig(name="openwebtext", path=str(tmp_path), vocab_size=256))


def test_unused_ids_still_need_room(tmp_path):
    """All ids lie below 200, but the encoder's vocabulary is 257, and that is what the model needs."""

    class NoEnd(CodePoints):
        eot_token = 0

    def build(folder):
        return write_gpt2_bins(folder, [[f"doc {i}" for i in range(40)]], NoEnd(), None, 0.3)

    publish_bins(tmp_path, build, {"name": "openwebtext", "tokenizer": "gpt2"})
    with pytest.raises(UserError, match=r"data\.vocab_size=200 is smaller than the vocabulary .*257"):
        prepare(DataConfig(name="openwebtext", path=str(tmp_path), vocab_size=200))


def test_stops_at_max_tokens(tmp_path):
    def endless():
        i = 0
        while True:
            yield [f"document {i:09d} {j}" for j in range(20)]
            i += 1

    counts = write_gpt2_bins(tmp_path, endless(), CodePoints(), 5000, 0.1)["tokens"]
    assert 5000 <= sum(counts.values()) < 5000 + len("document 123456789 10") + 1


def test_no_validation_document(tmp_path):
    with pytest.raises(UserError, match="0 validation tokens: raise --val-frac"):
        build_gpt2(tmp_path, ["one"], val_frac=1e-9)


def test_failure_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "train.bin").write_bytes(b"half")
        raise RuntimeError("network gone")

    with pytest.raises(RuntimeError, match="network gone"):
        publish_bins(tmp_path / "out", fail, {})
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != ".lock"] == []


def test_two_commands_at_once(tmp_path):
    def build_again(folder):
        return publish_bins(tmp_path, build_again, {})

    with pytest.raises(UserError, match="another process is writing"):
        publish_bins(tmp_path, build_again, {})


def test_folder_that_cannot_be_written(tmp_path, shakespeare):
    with pytest.raises(UserError, match=r"cannot write .*input\.txt.*--path"):
        write_corpus("shakespeare_char", shakespeare / "out", [shakespeare], None, 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wikitext"], "invalid choice"),
        (["openwebtext", "--max-tokens", "0"], "--max-tokens 0"),
        (["openwebtext", "--val-frac", "1"], "--val-frac 1"),
    ],
)
def test_bad_command_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_bad_sources(tmp_path, capsys):
    assert main(["shakespeare_char", "--source", str(tmp_path / "absent.txt")]) == 1
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    assert main(["shakespeare_char", "--source", str(tmp_path / "latin.txt")]) == 1
    assert "not readable as UTF-8" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match="mix text and JSON"):
        check_sources([tmp_path / "latin.txt", tmp_path / "a.jsonl"])
    with pytest.raises(UserError, match="wikitext"):
        write_corpus("wikitext", tmp_path, [], None, 0.1)
    (tmp_path / "empty.txt").write_text("")
    assert main(["shakespeare_char", "--source", str(tmp_path / "empty.txt")]) == 1
    assert "too short" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "call"), [("datasets", "stream"), ("tiktoken", "encoder")])
def test_absent_extras_name_the_remedy(monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"`{package}`, which is not installed; .*pip install -e \.\[data\]"):
        if call == "stream":
            next(stream_batches(CORPORA["openwebtext"], []))
        else:
            load_gpt2_encoder()


def test_streaming_local_text_by_paragraph(tmp_path):
    pytest.importorskip("datasets")
    source = tmp_path / "a.txt"
    source.write_text("".join(f"paragraph {i}\nits second line\n\n" for i in range(300)))
    texts = [text for batch in stream_batches(CORPORA["openwebtext"], [source]) for text in batch]
    assert [text.strip() for text in texts] == [f"paragraph {i}\nits second line" for i in range(300)]


def test_streaming_local_json_lines(tmp_path):
    pytest.importorskip("datasets")
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"doc\n\n{i}"}) + "\n" for i in range(300)))
    facts = write_corpus("fineweb_edu", tmp_path / "out", [source], None, 0.2, load_encoder=CodePoints)
    assert facts["tokens"]["train"] + facts["tokens"]["val"] == sum(len(f"doc\n\n{i}") + 1 for i in range(300))
    assert prepare(DataConfig(name="fineweb_edu", path=str(tmp_path / "out"), vocab_size=257)).vocab_size == 257


@pytest.mark.parametrize("content", ['{"body": "x"}\n', '{"text": 1}\n', '{"text": '])
def test_rows_without_text(tmp_path, content):
    pytest.importorskip("datasets")
    source = tmp_path / "a.jsonl"
    source.write_text(content)
    with pytest.raises(UserError, match=r"a\.jsonl"):
        list(stream_batches(CORPORA["fineweb_edu"], [source]))


def test_hub_that_cannot_be_reached(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fail(**_):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"cannot read Skylion007/openwebtext.*no route.*--source"):
        list(stream_batches(CORPORA["openwebtext"], []))


def test_characters_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STEP", 7)
    counts = module.write_char_bins(tmp_path, TEXT, None)["tokens"]
    assert sum(counts.values()) == len(TEXT)
    assert (tmp_path / "train.bin").stat().st_size == 2 * counts["train"]
