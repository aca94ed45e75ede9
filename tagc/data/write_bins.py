"""Write nanoGPT-style ``train.bin`` and ``val.bin`` with a JSON manifest, never a pickle. Whole or absent."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tagc.data.bins import find_token_files
from tagc.data.cache import MANIFEST, write_manifest
from tagc.data.corpora import CORPORA, Encoder, is_validation, load_gpt2_encoder, read_whole_text, stream_batches
from tagc.data.progress import track_progress
from tagc.data.tokens import write_tokens
from tagc.errors import UserError

CHAR_VAL_FRAC = 0.1  # the end of the text, as in nanoGPT
FILES = ("val.bin", "train.bin")
STEP = 1 << 20  # characters per write

log = logging.getLogger("tagc")


def write_corpus(
    name: str,
    out: Path,
    sources: list[Path],
    max_tokens: int | None,
    val_frac: float,
    load_encoder: Callable[[], Encoder] = load_gpt2_encoder,
) -> dict[str, Any]:
    """Make the token files of a known corpus in ``out``; returns the facts that its manifest records.

    Errors: ``UserError`` naming the corpus, file or option and the remedy.
    """
    if name not in CORPORA:
        raise UserError(f"{name} is not a corpus that can be prepared; legal: {', '.join(CORPORA)}")
    corpus = CORPORA[name]

    def build(folder: Path) -> dict[str, Any]:
        if corpus.tokenizer == "char":
            return write_char_bins(folder, read_whole_text(corpus, sources), max_tokens)
        return write_gpt2_bins(folder, stream_batches(corpus, sources), load_encoder(), max_tokens, val_frac)

    origin = [source.name for source in sources] or corpus.origin
    return publish_bins(out, build, {"name": name, "tokenizer": corpus.tokenizer, "origin": origin})


def publish_bins(out: Path, build: Callable[[Path], dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """Let ``build(folder)`` write the files beside their place, then rename them into ``out``, the manifest last.

    Errors: ``UserError`` if ``out`` already holds tokens, is being written, or cannot be written.
    """
    building = out / ".building"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock", timeout=0):
            if any(find_token_files(out)) or (out / MANIFEST).exists():
                raise UserError(f"{out} already holds token files; remove them or choose another folder with --path")
            shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
            try:
                building.mkdir()
                facts = {**facts, **build(building)}
                write_manifest(building, facts, list(FILES))
                for file in (*FILES, MANIFEST):
                    (building / file).rename(out / file)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except Timeout as error:
        raise UserError(
            f"another process is writing {out}; wait for it, or choose another folder with --path"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise UserError(f"cannot write {out}: {error}; choose a folder with free space by --path") from error
    return facts


def write_char_bins(folder: Path, text: str, max_tokens: int | None) -> dict[str, Any]:
    """One token per character; the vocabulary is the sorted characters. The last tenth validates, as in nanoGPT."""
    text = text[:max_tokens]
    chars = sorted(set(text))
    ids = {char: i for i, char in enumerate(chars)}
    border = int(len(text) * (1 - CHAR_VAL_FRAC))
    counts = {}
    for split, part in (("train", text[:border]), ("val", text[border:])):
        with (folder / f"{split}.bin").open("wb") as file:
            pieces = (part[first : first + STEP] for first in range(0, len(part), STEP))
            counts[split] = sum(write_tokens(file, [ids[char] for char in piece]) for piece in pieces)
    _check_counts(counts, "the text is too short; give more of it")
    return {"vocab_size": len(chars), "chars": chars, "tokens": counts}


def write_gpt2_bins(
    folder: Path, batches: Iterable[list[str]], encoder: Encoder, max_tokens: int | None, val_frac: float
) -> dict[str, Any]:
    """Encode documents as they come, each followed by the end of text, until at least ``max_tokens`` are written."""
    counts = {"train": 0, "val": 0}
    with (
        (folder / "train.bin").open("wb") as train,
        (folder / "val.bin").open("wb") as val,
        track_progress("tokens", total=max_tokens) as advance,
    ):
        for ids, is_val in _encode_documents(batches, encoder, val_frac):
            split, file = ("val", val) if is_val else ("train", train)
            written = write_tokens(file, ids)
            counts[split] += written
            advance(written)
            if max_tokens is not None and sum(counts.values()) >= max_tokens:
                break
    _check_counts(counts, "raise --val-frac, or give more documents or --max-tokens")
    return {"vocab_size": encoder.n_vocab, "tokens": counts, "val_frac": val_frac}


def _encode_documents(
    batches: Iterable[list[str]], encoder: Encoder, val_frac: float
) -> Iterable[tuple[list[int], bool]]:
    for batch in batches:
        texts = [text for text in batch if text.strip()]
        for text, ids in zip(texts, encoder.encode_ordinary_batch(texts), strict=True):
            yield [*ids, encoder.eot_token], is_validation(text, val_frac)


def _check_counts(counts: dict[str, int], remedy: str) -> None:
    if not all(counts.values()):
        raise UserError(f"only {counts['train']:,} training and {counts['val']:,} validation tokens: {remedy}")
