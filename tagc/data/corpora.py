"""Known corpora and their texts, streamed from the Hugging Face hub or from local files. Nothing is kept in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tagc.errors import UserError

TEXT_COLUMN = "text"
DOCUMENTS_PER_BATCH = 256
INSTALL_REMEDY = "install the optional packages with: pip install -e .[data]"


class Encoder(Protocol):
    """The part of ``tiktoken.Encoding`` that is used here."""

    @property
    def n_vocab(self) -> int:
        """Ids lie in [0, n_vocab)."""
        ...

    @property
    def eot_token(self) -> int:
        """The id that separates texts."""
        ...

    def encode_ordinary_batch(self, text: list[str]) -> list[list[int]]:
        """Ids of each text; special tokens are treated as ordinary text."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Where a corpus comes from and how it becomes tokens."""

    tokenizer: str  # char | gpt2
    origin: str  # for people
    load: dict[str, Any] = field(default_factory=dict)  # arguments of datasets.load_dataset


CORPORA = {
    "shakespeare_char": Corpus(
        "char",
        "tiny Shakespeare, 1.1 MB",
        {
            "path": "text",
            "data_files": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "sample_by": "document",
        },
    ),
    "openwebtext": Corpus("gpt2", "Skylion007/openwebtext, about 9 billion tokens", {"path": "Skylion007/openwebtext"}),
    "fineweb_edu": Corpus(
        "gpt2",
        "HuggingFaceFW/fineweb-edu, sample of 10 billion tokens",
        {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"},
    ),
}


def check_sources(sources: Sequence[Path]) -> str:
    """The kind of the local files: ``"text"`` or ``"json"``.

    Errors: ``UserError`` naming the file that is missing or unlike the others.
    """
    kinds = {}
    for source in sources:
        if not source.is_file():
            raise UserError(f"--source {source}: no such file")
        kinds[source] = "json" if source.suffix in (".jsonl", ".json") else "text"
    if len(set(kinds.values())) > 1:
        raise UserError(f"--source: {', '.join(map(str, sources))} mix text and JSON lines; give files of one kind")
    return kinds[sources[0]]


def stream_batches(corpus: Corpus, sources: Sequence[Path]) -> Iterator[list[str]]:
    """Documents in batches, from ``sources`` if given, otherwise from the hub.

    Local files: ``.jsonl``/``.json`` hold one document per line under ``"text"``; in any other file documents are
    paragraphs parted by an empty line.

    Errors: ``UserError`` if ``datasets`` is absent, the corpus cannot be fetched or a row holds no text.
    """
    load, place = corpus.load, corpus.origin
    if sources:
        kind, place = check_sources(sources), ", ".join(map(str, sources))
        load = {"path": kind, "data_files": [str(source) for source in sources]}
        load |= {"sample_by": "paragraph"} if kind == "text" else {}
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"reading {place} needs the package `datasets`, which is not installed; {INSTALL_REMEDY}"
        ) from error
    try:
        for batch in datasets.load_dataset(**load, split="train", streaming=True).iter(DOCUMENTS_PER_BATCH):
            texts = batch.get(TEXT_COLUMN)
            if texts is None or not all(isinstance(text, str) for text in texts):
                raise UserError(f"{place}: a row without a string under {TEXT_COLUMN!r}; every row needs one")
            yield texts
    except UserError:
        raise
    except Exception as error:  # the hub's clients raise a dozen unrelated types
        raise UserError(
            f"cannot read {place}: {type(error).__name__}: {error}; check the network, or give local text or "
            "JSON-lines files with --source"
        ) from error


def read_whole_text(corpus: Corpus, sources: Sequence[Path]) -> str:
    """The text of a small corpus as one string; local files are read as they are, one after another.

    Errors: ``UserError`` if a file cannot be read as UTF-8 text or the corpus cannot be fetched.
    """
    if not sources:
        return "".join(text for batch in stream_batches(corpus, sources) for text in batch)
    check_sources(sources)
    try:
        return "".join(source.read_text(encoding="utf-8") for source in sources)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--source {', '.join(map(str, sources))}: not readable as UTF-8 text ({error})") from error


def load_gpt2_encoder() -> Encoder:
    """tiktoken's GPT-2 encoding, which it downloads once.

    Errors: ``UserError`` if ``tiktoken`` is absent or the ranks cannot be fetched.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise UserError(
            f"GPT-2 tokens need the package `tiktoken`, which is not installed; {INSTALL_REMEDY}"
        ) from error
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests' errors, a bad checksum
        raise UserError(
            f"tiktoken cannot fetch the GPT-2 vocabulary: {type(error).__name__}: {error}; check the network once, or "
            "set TIKTOKEN_CACHE_DIR to a folder that holds it"
        ) from error


def is_validation(text: str, val_frac: float) -> bool:
    """Whether a document belongs to the validation split: by hash of its text, so that repeats stay on one side."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") < val_frac * 2**64
