"""What the launcher tells every rank about the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class DataInfo:
    """Checked token files, as plain values: ``DataInfo(**json.loads(json.dumps(asdict(info))))`` is equal."""

    train_files: tuple[str, ...]  # shards in reading order
    val_files: tuple[str, ...]
    vocab_size: int  # every id lies in [0, vocab_size)
    train_tokens: int
    val_tokens: int
    fingerprint: str  # sha256 (hex) over the contents of all files, wherever they lie
    description: str  # one line for the log

    def __post_init__(self) -> None:
        """JSON turns tuples into lists; turn them back so that equal data compares equal."""
        object.__setattr__(self, "train_files", tuple(self.train_files))
        object.__setattr__(self, "val_files", tuple(self.val_files))


def fingerprint_contents(train_sha256: Iterable[str], val_sha256: Iterable[str]) -> str:
    """sha256 (hex) of the files' own sha256 digests, in order: the identity of the data without its location."""
    digest = hashlib.sha256()
    for split, hashes in (("train", train_sha256), ("val", val_sha256)):
        for value in hashes:
            digest.update(f"{split} {value}\n".encode())
    return digest.hexdigest()
