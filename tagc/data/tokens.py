"""Write token ids, and read several token files (see formats.py) as one array."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tagc.data.formats import TOKEN_DTYPE, TokenFile, inspect_file
from tagc.data.info import DataInfo
from tagc.errors import UserError

MAX_OPEN_FILES = 16  # per Tokens: a process may have 1,024 or fewer open files, and data sets have that many shards


def write_tokens(file: BinaryIO, ids: Sequence[int] | np.ndarray) -> int:
    """Append ids, each in [0, 65536), to an open binary file as raw uint16; returns their number.

    Errors: ``OverflowError`` if an id does not fit.
    """
    array = np.asarray(ids, dtype=np.int64)
    if array.size and not 0 <= array.min() <= array.max() <= np.iinfo(TOKEN_DTYPE).max:
        raise OverflowError(f"token ids {array.min()}..{array.max()} do not fit uint16")
    file.write(array.astype(TOKEN_DTYPE).tobytes())  # not tofile: that hides the reason when the disk is full
    return array.size


def _map_file(file: TokenFile) -> np.ndarray:
    try:
        return np.memmap(file.path, file.dtype, "r", file.offset_bytes, (file.count,))
    except (OSError, ValueError) as error:  # the latter: it has become shorter
        raise UserError(
            f"the token file {file.path} can no longer be read ({error}); put it back and run the same command again"
        ) from error


class Tokens:
    """Token files that read as one array. At most ``MAX_OPEN_FILES`` of them are open (memory-mapped) at a time."""

    def __init__(self, files: Sequence[str | Path], fingerprint: str = "") -> None:
        """Check ``files`` in order. ``fingerprint`` names the data in a loader's state.

        Errors: as :func:`inspect_file`; ``UserError`` if there is no file.
        """
        if not files:
            raise UserError("there are no token files to open; check data.path")
        self._parts = [inspect_file(Path(path)) for path in files]
        self.files = tuple(str(part.path) for part in self._parts)
        self.fingerprint = fingerprint
        self._ends = np.cumsum([part.count for part in self._parts])
        self._map = lru_cache(MAX_OPEN_FILES)(_map_file)

    def __len__(self) -> int:
        """Tokens in all files together."""
        return int(self._ends[-1])

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens ``start .. start+length-1`` as int64, across file borders.

        Example: files [5 6 7] and [8 9]: ``read(1, 3)`` is [6 7 8].
        Errors: ``IndexError`` if the range leaves the data; ``UserError`` if a file can no longer be read.
        """
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start}..{start + length} of {len(self)} in {self.files}")
        result, done = np.empty(length, dtype=np.int64), 0
        part = int(np.searchsorted(self._ends, start, side="right"))
        while done < length:
            tokens, end = self._map(self._parts[part]), int(self._ends[part])
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
