"""Token files: raw uint16 (nanoGPT) or headered uint16 shards (modded-nanogpt), several of them read as one array.

Both formats are little-endian. A headered shard starts with 256 int32: magic, version, token count, zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tagc.data.info import DataInfo
from tagc.errors import UserError

TOKEN_DTYPE = np.dtype("<u2")
HEADER_DTYPE = np.dtype("<i4")
HEADER_BYTES = 256 * HEADER_DTYPE.itemsize
SHARD_MAGIC = 20240520
SHARD_VERSION = 1


@dataclass(frozen=True)
class TokenFile:
    """Where the tokens of one checked file lie."""

    path: Path
    offset_bytes: int  # 0 for a raw file, HEADER_BYTES for a shard
    count: int  # tokens, >= 1


def inspect_file(path: Path) -> TokenFile:
    """Tell the format of a token file by its first bytes and check its length.

    Errors: ``UserError`` naming the file and the remedy: missing, empty, truncated, of another version.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = np.frombuffer(file.read(3 * HEADER_DTYPE.itemsize), dtype=np.uint8)
    except OSError as error:
        raise UserError(f"cannot read the token file {path}: {error.strerror}; check data.path") from error
    if size_bytes == 0:
        raise UserError(f"{path} is empty; make or copy it again")
    if head.size == 3 * HEADER_DTYPE.itemsize and head.view(HEADER_DTYPE)[0] == SHARD_MAGIC:
        return _inspect_shard(
            path, size_bytes, version=int(head.view(HEADER_DTYPE)[1]), count=int(head.view(HEADER_DTYPE)[2])
        )
    if size_bytes % TOKEN_DTYPE.itemsize:
        raise UserError(
            f"{path} has {size_bytes:,} bytes, an odd number: it is truncated or not a file of uint16 tokens; "
            "make or copy it again"
        )
    return TokenFile(path, 0, size_bytes // TOKEN_DTYPE.itemsize)


def _inspect_shard(path: Path, size_bytes: int, version: int, count: int) -> TokenFile:
    if version != SHARD_VERSION:
        raise UserError(
            f"{path} is a token shard of version {version}; only version {SHARD_VERSION} (uint16) can be read: "
            "convert it or use other files"
        )
    held = (size_bytes - HEADER_BYTES) / TOKEN_DTYPE.itemsize
    if count != held:
        raise UserError(
            f"{path}: its header promises {count:,} tokens but the file holds {max(held, 0):,g}: it is truncated or "
            "damaged; copy it again"
        )
    if count == 0:
        raise UserError(f"{path} is empty (its header promises 0 tokens); make or copy it again")
    return TokenFile(path, HEADER_BYTES, count)


def write_tokens(file: BinaryIO, ids: Sequence[int] | np.ndarray) -> int:
    """Append ids, each in [0, 65536), to an open binary file as raw uint16; returns their number.

    Errors: ``OverflowError`` if an id does not fit.
    """
    array = np.asarray(ids, dtype=np.int64)
    if array.size and not 0 <= array.min() <= array.max() <= np.iinfo(TOKEN_DTYPE).max:
        raise OverflowError(f"token ids {array.min()}..{array.max()} do not fit uint16")
    file.write(array.astype(TOKEN_DTYPE).tobytes())  # not tofile: that hides the reason when the disk is full
    return array.size


class Tokens:
    """Memory-mapped token files that read as one array."""

    def __init__(self, files: Sequence[str | Path], fingerprint: str = "") -> None:
        """Map ``files`` in order. ``fingerprint`` names the data in a loader's state.

        Errors: as :func:`inspect_file`; ``UserError`` if there is no file.
        """
        if not files:
            raise UserError("there are no token files to open; check data.path")
        parts = [inspect_file(Path(path)) for path in files]
        self.files = tuple(str(part.path) for part in parts)
        self.fingerprint = fingerprint
        self._maps = [np.memmap(p.path, TOKEN_DTYPE, "r", p.offset_bytes, (p.count,)) for p in parts]
        self._ends = np.cumsum([part.count for part in parts])

    def __len__(self) -> int:
        """Tokens in all files together."""
        return int(self._ends[-1])

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens ``start .. start+length-1`` as int64, across file borders.

        Example: files [5 6 7] and [8 9]: ``read(1, 3)`` is [6 7 8].
        Errors: ``IndexError`` if the range leaves the data.
        """
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start}..{start + length} of {len(self)} in {self.files}")
        result, done = np.empty(length, dtype=np.int64), 0
        part = int(np.searchsorted(self._ends, start, side="right"))
        while done < length:
            tokens, end = self._maps[part], int(self._ends[part])
            first = start + done - (end - len(tokens))
            piece = tokens[first : first + length - done]
            result[done : done + len(piece)] = piece
            done, part = done + len(piece), part + 1
        return result


def open_tokens(info: DataInfo, split: str) -> Tokens:
    """Open the ``"train"`` or ``"val"`` files of prepared data.

    Errors: ``UserError`` if a file has changed since :func:`tagc.data.prepare` or ``split`` is neither.
    """
    if split not in ("train", "val"):
        raise UserError(f"split={split!r} is unknown; legal: train, val")
    files, count = (info.train_files, info.train_tokens) if split == "train" else (info.val_files, info.val_tokens)
    tokens = Tokens(files, info.fingerprint)
    if len(tokens) != count:
        raise UserError(f"{', '.join(files)}: {len(tokens):,} tokens, but {count:,} when the run began; start it again")
    return tokens
