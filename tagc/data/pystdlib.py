"""The built-in data: the running interpreter's own standard library, tokenised once and cached.

Real text that every machine with Python already has, so that the first run needs no network.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tagc.config import DataConfig
from tagc.data.cache import ensure_folder, find_cache_root, write_manifest
from tagc.data.info import DataInfo, fingerprint_contents
from tagc.data.progress import track_progress
from tagc.data.tokens import write_tokens
from tagc.errors import UserError

Documents = Sequence[tuple[str, str]]  # (relative name, text), sorted by name

# encodings: generated character tables, 6 % of the tokens and hardly text. pydoc_data: its strings are read as topics.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"})
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0  # special tokens come first
SMALLEST_VOCAB = 256 + 1  # every byte and the end of text
VAL_FRAC = 0.04  # of the documents, by hash of the name
BPE_SAMPLE_STRIDE = 4  # the BPE is trained on every fourth training document: 4x faster, 1 % more tokens
ENCODE_BATCH = 64  # documents
MIN_TOKENS = 200_000
FORMAT = 1  # raise it when the same sources would give other files

log = logging.getLogger("tagc")


def collect_documents(root: Path | None = None) -> Documents:
    """(name, text) of every source file below ``root``; by default of the standard library, with the topics.

    Undecodable, empty and repeated texts are left out. Sorted by name: the same interpreter gives the same documents.
    """
    documents = dict(_read_sources(root or Path(sysconfig.get_path("stdlib"))))
    if root is None:
        documents.update(_read_topics())
    seen: set[str] = set()
    unique = []
    for name, text in sorted(documents.items()):
        if text.strip() and text not in seen:
            seen.add(text)
            unique.append((name, text))
    return unique


def _read_sources(root: Path) -> Iterator[tuple[str, str]]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            try:
                yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError) as error:  # test files in other encodings; dangling links
                log.debug("pystdlib: %s left out: %s", path, error)


def _read_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        log.info("pystdlib: this Python has no pydoc_data.topics; the language reference is left out")
        return {}
    return {f"topics/{name}": text for name, text in topics.items()}


def prepare_pystdlib(config: DataConfig, documents: Documents | None = None, min_tokens: int = MIN_TOKENS) -> DataInfo:
    """Return the cached tokens of ``documents`` (default: the standard library), building the cache if necessary.

    The cache lies in ``config.path`` or the user's cache directory, in a folder named by Python version, vocabulary and
    a hash of the documents. Costs about 0.3 s when cached, otherwise a few seconds.

    Errors: ``UserError`` if fewer than ``min_tokens`` tokens are found, the vocabulary is too small for bytes, or the
    folder cannot be written.
    """
    if config.vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"data.vocab_size={config.vocab_size} is too small for a byte-level vocabulary; pystdlib needs at least "
            f"{SMALLEST_VOCAB}"
        )
    documents = collect_documents() if documents is None else documents
    version, identity = platform.python_version(), _hash_documents(documents, config.vocab_size)
    root = Path(config.path).expanduser().absolute() if config.path else find_cache_root()
    folder = root / f"pystdlib-py{version}-v{config.vocab_size}-{identity[:16]}"
    build = partial(_build, documents=documents, vocab_size=config.vocab_size, min_tokens=min_tokens)
    return _describe(folder, ensure_folder(folder, build), config.vocab_size)


def _describe(folder: Path, manifest: dict[str, Any], vocab_size: int) -> DataInfo:
    tokens, files = manifest["tokens"], manifest["files"]
    return DataInfo(
        train_files=(str(folder / "train.bin"),),
        val_files=(str(folder / "val.bin"),),
        vocab_size=vocab_size,
        train_tokens=tokens["train"],
        val_tokens=tokens["val"],
        fingerprint=fingerprint_contents([files["train.bin"]["sha256"]], [files["val.bin"]["sha256"]]),
        description=f"pystdlib: Python {manifest['python']} standard library, {tokens['train']:,} training and "
        f"{tokens['val']:,} validation tokens, byte-level BPE of {vocab_size:,}, in {folder}",
    )


def _hash_documents(documents: Documents, vocab_size: int) -> str:
    """Everything the files depend on; another release of ``tokenizers`` may merge differently."""
    digest = hashlib.sha256(f"{FORMAT} {vocab_size} {tokenizers.__version__}".encode())
    for name, text in documents:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(f"\0{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def is_validation(name: str) -> bool:
    """Whether a document belongs to the validation split: decided by its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < VAL_FRAC * 2**32


def train_bpe(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens; id 0 (END_OF_TEXT_ID) is the end of text. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@contextmanager
def _parallel_tokenizers() -> Iterator[None]:
    """All cores while we encode; afterwards off, so that a later fork of this process neither warns nor deadlocks."""
    chosen = "TOKENIZERS_PARALLELISM" in os.environ
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        yield
    finally:
        if not chosen:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _build(folder: Path, documents: Documents, vocab_size: int, min_tokens: int) -> None:
    began = time.perf_counter()
    log.info("pystdlib: tokenising %d documents (once per interpreter)", len(documents))
    with _parallel_tokenizers():
        training_texts = [text for name, text in documents if not is_validation(name)]
        with track_progress("training the BPE", total=None):
            tokenizer = train_bpe(training_texts[::BPE_SAMPLE_STRIDE], vocab_size)
        counts = _encode(tokenizer, documents, folder)
    if sum(counts.values()) < min_tokens or not all(counts.values()):
        raise UserError(
            f"data.name=pystdlib: only {counts['train']:,} training and {counts['val']:,} validation tokens of source "
            f"text in {sysconfig.get_path('stdlib')} (at least {min_tokens:,} are needed); this Python comes without "
            "its library's sources: install them (Debian: libpython3-stdlib), use another interpreter, or give "
            "your own files with data=bin data.path=FOLDER"
        )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))  # save() hides the errno of a full disk
    facts = {
        "format": FORMAT,
        "name": "pystdlib",
        "tokenizer": "byte-level BPE",
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "vocab_size": vocab_size,
        "documents": len(documents),
        "tokens": counts,
    }
    write_manifest(folder, facts, ["train.bin", "val.bin", "tokenizer.json"])
    log.info("pystdlib: %s tokens in %.1f s", f"{sum(counts.values()):,}", time.perf_counter() - began)


def _encode(tokenizer: Tokenizer, documents: Documents, folder: Path) -> dict[str, int]:
    """Write train.bin and val.bin, each document followed by the end of text; returns tokens per split."""
    counts = {"train": 0, "val": 0}
    with (
        (folder / "train.bin").open("wb") as train,
        (folder / "val.bin").open("wb") as val,
        track_progress("tokenising the standard library", total=len(documents)) as advance,
    ):
        for first in range(0, len(documents), ENCODE_BATCH):
            batch = documents[first : first + ENCODE_BATCH]
            encodings = tokenizer.encode_batch_fast([text for _, text in batch])
            for (name, _), encoding in zip(batch, encodings, strict=True):
                split, file = ("val", val) if is_validation(name) else ("train", train)
                counts[split] += write_tokens(file, [*encoding.ids, END_OF_TEXT_ID])
            advance(len(batch))
    return counts
