"""Prepared token files: find them, check every token once, describe them."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tagc.data.cache import MANIFEST, find_cache_root, read_manifest
from tagc.data.formats import TOKEN_DTYPE, TokenFile, inspect_file
from tagc.data.info import DataInfo, fingerprint_contents
from tagc.data.progress import track_progress
from tagc.errors import UserError

CHUNK_BYTES = 1 << 23
SHOW_PROGRESS_BYTES = 1 << 28  # below, a scan is over before a bar can be read

log = logging.getLogger("tagc")


class Scan(NamedTuple):
    """What one pass over a file tells."""

    max_token: int
    sha256: str  # of the whole file, header included


def find_token_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Training and validation files of a folder, or of a prefix: ``PREFIX_train.bin`` or ``PREFIX_train_*.bin``.

    A folder holds ``train.bin`` and ``val.bin``, or shards ``*_train_*.bin`` and ``*_val_*.bin``. Both lists are sorted
    by name and may be empty.

    Errors: ``UserError`` if a folder holds both kinds.
    """
    is_folder, prefix = path.is_dir(), glob.escape(str(path))
    whole, shards = (f"{path}/", f"{prefix}/*_") if is_folder else (f"{path}_", f"{prefix}_")
    whole_files = {split: [Path(f"{whole}{split}.bin")] for split in ("train", "val")}
    shard_files = {split: sorted(map(Path, glob.glob(f"{shards}{split}_*.bin"))) for split in ("train", "val")}
    has_whole = {split: files[0].exists() for split, files in whole_files.items()}
    if any(has_whole.values()) and any(shard_files.values()):
        raise UserError(
            f"data.path={path} holds both train.bin/val.bin and *_train_*.bin/*_val_*.bin; move one kind away, or set "
            "data.path to a prefix such as FOLDER/fineweb"
        )
    if any(shard_files.values()):
        return shard_files["train"], shard_files["val"]
    train, val = (whole_files[split] if has_whole[split] else [] for split in ("train", "val"))
    return train, val


def check_bins(name: str, path: Path, vocab_size: int) -> DataInfo:
    """Check every file below ``path`` (formats, lengths, ids) and describe them.

    Reads all files once; the result is kept in the cache directory and reused while a file does not change.

    Errors: ``UserError`` naming the file and the remedy: missing, empty, truncated, header mismatch, ids beyond
    ``vocab_size``, contents unlike the manifest.
    """
    train, val = find_token_files(path)
    for split, found in (("train", train), ("val", val)):
        if not found:
            raise UserError(
                f"data.path={path}: no {split}.bin and no *_{split}_*.bin found; set data.path to the folder (or file "
                "prefix) that holds the training and validation tokens"
            )
    files = [inspect_file(file) for file in (*train, *val)]
    scans = _scan_files(files)
    for file, scan in zip(files, scans, strict=True):
        if scan.max_token >= vocab_size:
            raise UserError(
                f"{file.path} holds the token id {scan.max_token}, but data.vocab_size={vocab_size}; set "
                f"data.vocab_size to {scan.max_token + 1} or more, or use files made with this vocabulary"
            )
    hashes = [scan.sha256 for scan in scans]
    note = _check_manifest(path, files, hashes, vocab_size)
    train_tokens, val_tokens = (sum(f.count for f in part) for part in (files[: len(train)], files[len(train) :]))
    return DataInfo(
        train_files=tuple(str(file) for file in train),
        val_files=tuple(str(file) for file in val),
        vocab_size=vocab_size,
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        fingerprint=fingerprint_contents(hashes[: len(train)], hashes[len(train) :]),
        description=f"{name}: {train_tokens:,} training and {val_tokens:,} validation tokens in {len(files)} files, "
        f"vocabulary {vocab_size:,}{note}, in {path}",
    )


def _check_manifest(path: Path, files: list[TokenFile], hashes: list[str], vocab_size: int) -> str:
    """Compare with the manifest that ``python -m tagc.data.prepare`` leaves; files of other origin have none."""
    if not (path / MANIFEST).is_file():
        return ""
    try:
        manifest = read_manifest(path)
        expected = {name: facts["sha256"] for name, facts in manifest["files"].items()}
        needed, tokenizer = int(manifest["vocab_size"]), str(manifest["tokenizer"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path / MANIFEST} is damaged ({error!r}); prepare the data again, or remove that file if the .bin files "
            "are of another origin"
        ) from error
    for file, sha256 in zip(files, hashes, strict=True):
        if expected.get(file.path.name) != sha256:
            raise UserError(f"{file.path} does not match {path / MANIFEST}: it is damaged; prepare the data again")
    if needed > vocab_size:
        raise UserError(
            f"data.vocab_size={vocab_size} is smaller than the vocabulary of {path} ({needed}); set "
            f"data.vocab_size={needed} or more"
        )
    return f" ({tokenizer})"


def _scan_files(files: list[TokenFile]) -> list[Scan]:
    """One scan per file, from the sidecar where it is valid."""
    scans = {file: _load_sidecar(file) for file in files}
    total_bytes = sum(file.path.stat().st_size for file, scan in scans.items() if scan is None)
    with track_progress("checking tokens", total_bytes, enabled=total_bytes >= SHOW_PROGRESS_BYTES) as advance:
        return [scans[file] or _scan_file(file, advance) for file in files]


def _scan_file(file: TokenFile, advance: Callable[[float], None]) -> Scan:
    digest, max_token = hashlib.sha256(), 0
    with file.path.open("rb") as stream:
        digest.update(stream.read(file.offset_bytes))
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            max_token = max(max_token, int(np.frombuffer(chunk, file.dtype).max()))
            advance(len(chunk))
    scan = Scan(max_token, digest.hexdigest())
    _save_sidecar(file, scan)
    return scan


def _locate_sidecar(file: TokenFile) -> Path:
    """A name that changes with the file. ctime as well as mtime: ``cp -p`` and ``rsync -t`` keep the latter."""
    stat = file.path.stat()
    key = f"{file.path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    key += "" if file.dtype == TOKEN_DTYPE else f"\0{file.dtype.name}"
    return find_cache_root() / "scans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _load_sidecar(file: TokenFile) -> Scan | None:
    try:
        scan = json.loads(_locate_sidecar(file).read_text())
        return Scan(int(scan["max_token"]), str(scan["sha256"]))
    except (OSError, ValueError, TypeError, KeyError):  # absent or damaged: scan the file
        return None


def _save_sidecar(file: TokenFile, scan: Scan) -> None:
    sidecar = _locate_sidecar(file)
    try:
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        sidecar.write_text(json.dumps(scan._asdict()))
    except OSError as error:
        log.info(
            "the check of %s cannot be kept in %s (%s); it is repeated next time", file.path, sidecar.parent, error
        )
