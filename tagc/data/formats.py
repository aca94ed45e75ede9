"""Tell by its first bytes what a token file is, so that nothing but token ids is ever trained on.

Read: raw little-endian uint16 (nanoGPT) and two formats with a header of 256 int32 (magic, version, tokens, zeros):
magic 20240520 with uint16 ids (llm.c, modded-nanogpt) and magic 20240801 with uint32 ids (llm.c for Llama 3).
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tagc.errors import UserError

TOKEN_DTYPE = np.dtype("<u2")
HEADER_DTYPE = np.dtype("<i4")
HEADER_BYTES = 256 * HEADER_DTYPE.itemsize
SHARD_MAGIC = 20240520
SHARD_KINDS: dict[int, tuple[int, np.dtype]] = {
    SHARD_MAGIC: (1, TOKEN_DTYPE),
    20240801: (7, np.dtype("<u4")),
}  # magic -> version, dtype of the ids
OTHER_MAGICS = {20240326: "model checkpoint", 20240327: "debug state", 20240522: "evaluation set"}  # of llm.c
HEAD_BYTES = 4096  # of a file that are looked at
TEXT_BYTES = 64  # of these; 32 token ids that all look like text do not occur by chance
SMALLEST_TEXT_BYTES = 16
SMALLEST_WIDE_PAIRS = 16
HIGHEST_UPPER_HALF = 3  # of a uint32 id: vocabularies have less than 2**18 entries

_UNPACK = "unpack it and point data.path at the unpacked .bin files"
_EXPORT = "write its token ids with numpy: np.asarray(ids, dtype='<u2').tofile('train.bin')"
_SIGNATURES = (
    (b"\x93NUMPY", "a numpy .npy file", "convert it: np.load(file).astype('<u2').tofile('train.bin')"),
    (b"\x1f\x8b\x08", "compressed by gzip", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK),
    (b"\xfd7zXZ\0", "compressed by xz", _UNPACK),
    (b"BZh", "compressed by bzip2", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed by lz4", _UNPACK),
    (b"PK\x03\x04", "a zip archive (.zip, .npz or a torch checkpoint)", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"PAR1", "a parquet table", _EXPORT),
    (b"ARROW1", "an arrow file", _EXPORT),
    (b"\xff\xff\xff\xff", "an arrow stream", _EXPORT),
    (b"\x89HDF\r\n", "an HDF5 file", _EXPORT),
)
_TEXTS = (  # how a text begins, without leading blanks
    ("version https://git-lfs", "a pointer of git-lfs, not the data itself", "fetch the data with: git lfs pull"),
    ("/annex/objects/", "a pointer of git-annex, not the data itself", "fetch the data with: git annex get"),
    ("<", "an HTML or XML page, probably an error page saved in place of the data", "download the data again"),
    ("{", "JSON text", _EXPORT),
    ("[", "JSON text", _EXPORT),
    ("", "text", "tokenise it first, for example with: python -m tagc.data.prepare --help"),
)


@dataclass(frozen=True)
class TokenFile:
    """Where the tokens of one checked file lie."""

    path: Path
    offset_bytes: int  # 0 for a raw file, HEADER_BYTES for a shard
    count: int  # tokens, >= 1
    dtype: np.dtype = TOKEN_DTYPE


def inspect_file(path: Path) -> TokenFile:
    """Tell the format of a token file by its first bytes and check its length. Reads at most ``HEAD_BYTES``.

    Errors: ``UserError`` naming the file and the remedy: missing, empty, truncated, of another version or format.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise UserError(f"cannot read the token file {path}: {error.strerror}; check data.path") from error
    if size_bytes == 0:
        raise UserError(f"{path} is empty; make or copy it again")
    for magic in (*SHARD_KINDS, *OTHER_MAGICS):
        signature = np.array(magic, HEADER_DTYPE).tobytes()
        if head.startswith(signature) or (1 < size_bytes < len(signature) and signature.startswith(head)):
            return _inspect_shard(path, head, size_bytes, magic)
    if found := describe_foreign(head):
        what, remedy = found
        raise UserError(f"{path} is no file of uint16 token ids: it is {what}; {remedy}")
    if size_bytes % TOKEN_DTYPE.itemsize:
        raise UserError(
            f"{path} has {size_bytes:,} bytes, an odd number: it is truncated or not a file of uint16 tokens; "
            "make or copy it again"
        )
    return TokenFile(path, 0, size_bytes // TOKEN_DTYPE.itemsize)


def describe_foreign(head: bytes) -> tuple[str, str] | None:
    """What a file that begins with ``head`` is, and the remedy, if it is no raw uint16 file; None if it may be one."""
    for signature, what, remedy in _SIGNATURES:
        if head.startswith(signature):
            return what, remedy
    text = _decode_text(head[:TEXT_BYTES])
    if text is not None:
        return next((what, remedy) for start, what, remedy in _TEXTS if text.lstrip("\ufeff \t\r\n").startswith(start))
    return ("an array of 32- or 64-bit numbers", _EXPORT) if _holds_wide_numbers(head) else None


def _decode_text(start: bytes) -> str | None:
    """The bytes as UTF-8 text, or None if they are none or too few to tell."""
    if len(start) < SMALLEST_TEXT_BYTES:
        return None
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return None
    return text if all((char >= " " and char != "\x7f") or char in "\t\r\n\f" for char in text) else None


def _holds_wide_numbers(head: bytes) -> bool:
    """Whether the upper halves of 32-bit numbers show: nearly zero, while the lower halves vary. Either byte order."""
    pairs = np.frombuffer(head[: len(head) // 4 * 4], TOKEN_DTYPE).reshape(-1, 2)
    if len(pairs) < SMALLEST_WIDE_PAIRS:
        return False
    for halves in (pairs, pairs.byteswap()[:, ::-1]):
        lower, upper = halves[:, 0], halves[:, 1]
        if upper.max() <= HIGHEST_UPPER_HALF < lower.max():
            return True
    return False


def _inspect_shard(path: Path, head: bytes, size_bytes: int, magic: int) -> TokenFile:
    if magic in OTHER_MAGICS:
        raise UserError(f"{path} is an llm.c {OTHER_MAGICS[magic]}, not a file of training tokens; check data.path")
    if size_bytes < 3 * HEADER_DTYPE.itemsize:
        raise UserError(
            f"{path} is a token shard cut off after {size_bytes} bytes, inside its header of {HEADER_BYTES:,} bytes; "
            "copy it again"
        )
    version, count = (int(number) for number in np.frombuffer(head, HEADER_DTYPE, 2, HEADER_DTYPE.itemsize))
    known_version, dtype = SHARD_KINDS[magic]
    if version != known_version:
        raise UserError(
            f"{path} is a token shard (header {magic}) of version {version}; only version {known_version} "
            f"({dtype.name}) can be read: convert it or use other files"
        )
    held = (size_bytes - HEADER_BYTES) / dtype.itemsize
    if count != held:
        raise UserError(
            f"{path}: its header promises {count:,} tokens but the file holds {max(held, 0):,g}: it is truncated or "
            "damaged; copy it again"
        )
    if count == 0:
        raise UserError(f"{path} is empty (its header promises 0 tokens); make or copy it again")
    return TokenFile(path, HEADER_BYTES, count, dtype)
