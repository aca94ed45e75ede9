"""What is no file of token ids is refused by name; both headered formats are read."""

import bz2
import gzip
import io
import lzma
import resource
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tagc.config import DataConfig
from tagc.data import open_tokens, prepare
from tagc.data.formats import describe_foreign, inspect_file
from tagc.errors import UserError
from tests.data.conftest import write_raw, write_shard

ROOT = Path(__file__).parents[2]
IDS = np.random.default_rng(0).integers(0, 50257, 4096)


def save_npy(ids: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, ids)
    return file.getvalue()


def save_zip(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("train.bin", content)
    return file.getvalue()


RAW = IDS.astype("<u2").tobytes()
LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca2\n"
)
FOREIGN = {
    "raw uint32": (IDS.astype("<u4").tobytes(), "32- or 64-bit numbers"),
    "raw uint32 of a large vocabulary": ((IDS * 2 + 30000).astype("<u4").tobytes(), "32- or 64-bit numbers"),
    "raw uint32, big-endian": (IDS.astype(">u4").tobytes(), "32- or 64-bit numbers"),
    "raw int64": (IDS.astype("<i8").tobytes(), "32- or 64-bit numbers"),
    "npy": (save_npy(IDS.astype("<u2")), r"numpy \.npy.*np\.load"),
    "gzip": (gzip.compress(RAW), "gzip; unpack"),
    "zstd": (b"\x28\xb5\x2f\xfd" + RAW, "zstd; unpack"),
    "xz": (lzma.compress(RAW), "xz; unpack"),
    "bzip2": (bz2.compress(RAW), "bzip2; unpack"),
    "zip": (save_zip(RAW), "zip archive"),
    "parquet": (b"PAR1" + RAW, "parquet"),
    "arrow": (b"ARROW1\0\0" + RAW, "arrow file"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + RAW, "HDF5"),
    "git-lfs pointer": (LFS, "git lfs pull"),
    "git-annex pointer": (b"/annex/objects/SHA256E-s1234--0123456789.bin\n", "git annex get"),
    "HTML": (b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n" * 9, "HTML.*download"),
    "HTML with a mark": (b"\xef\xbb\xbf\n<html><body>\xc3\xa9</body></html>\n" * 9, "HTML"),
    "JSON": (b'{"tokens": [1, 2, 3, 4, 5]}', "JSON"),
    "JSON list": (b"[15496, 995, 11, 262, 290]\n", "JSON"),
    "text": ("Brüder, zur Sonne, zur Freiheit: ".encode() * 9, r"text; tokenise it first"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_format_is_refused_by_name(tmp_path, name):
    content, message = FOREIGN[name]
    write_raw(tmp_path / "val.bin", range(50))
    (tmp_path / "train.bin").write_bytes(content + b"\n" * (len(content) % 2))  # an even size tells nothing
    with pytest.raises(UserError, match=message) as error:
        prepare(DataConfig(name="bin", path=str(tmp_path), vocab_size=65536))
    assert "train.bin" in str(error.value)


def test_token_ids_are_not_taken_for_another_format(tmp_path):
    generator = np.random.default_rng(1)
    for high in (2, 4, 5, 65, 128, 256, 50257, 65536):
        for count in (1, 2, 7, 8, 31, 32, 33, 4096):
            for low in (0, high // 2):
                ids = generator.integers(low, high, count).astype("<u2")
                assert describe_foreign(ids.tobytes()) is None, (low, high, count)
    assert describe_foreign(np.zeros(4096, "<u2").tobytes()) is None, "one token, many times"


def test_uint32_shards_of_llm_c_are_read_whole(tmp_path):
    """Ids above 65,535, which halves of words would turn into two tokens each."""
    ids = [128000, 5, 70000, 128255]
    for split in ("train", "val"):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240801, 7, len(ids)
        (tmp_path / f"x_{split}_0.bin").write_bytes(header.tobytes() + np.array(ids, "<u4").tobytes())
    info = prepare(DataConfig(name="bin", path=str(tmp_path), vocab_size=128256))
    assert info.train_tokens == 4 and open_tokens(info, "train").read(0, 4).tolist() == ids
    with pytest.raises(UserError, match=r"token id 128255, but data\.vocab_size=50304"):
        prepare(DataConfig(name="bin", path=str(tmp_path), vocab_size=50304))


def test_headers_that_lie(tmp_path):
    path = write_shard(tmp_path / "x_train_0.bin", [1, 2, 3])
    whole = path.read_bytes()
    for size_bytes in (2, 3, 4, 6, 8, 11):
        path.write_bytes(whole[:size_bytes])
        with pytest.raises(UserError, match=f"shard cut off after {size_bytes} bytes.*copy it again"):
            inspect_file(path)
    path.write_bytes(np.array([20240801, 1, 3], "<i4").tobytes() + whole[12:])
    with pytest.raises(UserError, match=r"20240801\) of version 1; only version 7 \(uint32\)"):
        inspect_file(path)
    path.write_bytes(np.array([20240326, 3, 3], "<i4").tobytes() + whole[12:])
    with pytest.raises(UserError, match=r"llm\.c model checkpoint"):
        inspect_file(path)


def test_more_shards_than_files_may_be_open(tmp_path):
    """80 shards under a limit of 64 files, read forwards and at random as the loader does."""
    for number in range(80):
        write_shard(tmp_path / f"x_train_{number:04d}.bin", range(10 * number, 10 * number + 10))
    write_shard(tmp_path / "x_val_0000.bin", range(10))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 64
    script = f"""
        import resource, numpy as np
        from tagc.config import DataConfig
        from tagc.data import open_tokens, prepare
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        info = prepare(DataConfig(name="bin", path={str(tmp_path)!r}, vocab_size=800))
        tokens, val = open_tokens(info, "train"), open_tokens(info, "val")
        assert tokens.read(0, 800).tolist() == list(range(800))
        for start in np.random.default_rng(0).integers(0, 780, 500).tolist():
            assert tokens.read(start, 20).tolist() == list(range(start, start + 20))
        assert val.read(0, 10).tolist() == list(range(10))
        print("read")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "read\n", done.stderr


def test_a_shard_that_vanishes_later_is_named(tmp_path):
    for number in range(20):
        write_shard(tmp_path / f"x_train_{number:04d}.bin", range(10))
    write_shard(tmp_path / "x_val_0000.bin", range(10))
    tokens = open_tokens(prepare(DataConfig(name="bin", path=str(tmp_path), vocab_size=10)), "train")
    (tmp_path / "x_train_0019.bin").unlink()
    (tmp_path / "x_train_0018.bin").write_bytes(b"short")
    for start in (180, 190):
        with pytest.raises(UserError, match=rf"x_train_00{start // 10}\.bin can no longer be read"):
            tokens.read(start, 5)
