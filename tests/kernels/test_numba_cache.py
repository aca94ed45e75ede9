"""The cache of compiled code: whatever its files and its disk are like, the function runs, with one warning at most."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = Path(__file__).parents[2] / "tagc/kernels/cpu/compiled.py"
# The kernels' decorator, on two functions that compile fast; loaded by its path, since the package imports torch.
PROGRAM = """
import importlib.util, os
spec = importlib.util.spec_from_file_location("compiled", os.environ["COMPILED"])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
compiled = module.compiled

@compiled()
def add(a, b):
    return a + b

@compiled(fastmath={"reassoc"})
def subtract(a, b):
    return a - b

print(add(5, 2), subtract(5, 2))
hits = sum(sum(f.stats.cache_hits.values()) for f in (add, subtract))
print("hits", hits)
"""


class Program:
    def __init__(self, folder: Path) -> None:
        self.source, self.cache = folder / "program.py", folder / "cache"
        self.source.write_text(PROGRAM)
        self.cache.mkdir()

    def run(self, **variables: str) -> tuple[int, list[str]]:
        """Loaded from the cache, and the lines on stderr."""
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(self.cache), "COMPILED": str(COMPILED), **variables}
        done = subprocess.run([sys.executable, self.source], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        values, hits = done.stdout.splitlines()
        assert values == "7 3"
        return int(hits.split()[1]), done.stderr.splitlines()

    def files(self, ending: str) -> list[Path]:
        found = sorted(self.cache.rglob(f"*.{ending}"))
        assert len(found) == 2
        return found


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def flip_in_the_middle(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 255 for byte in data[middle : middle + 8]) + data[middle + 8 :]


DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "garbage": lambda data: bytes((i * 97 + 13) % 256 for i in range(300)),
    "flipped": flip_in_the_middle,
}


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_entries_are_rebuilt_with_one_warning(program, ending):
    assert program.run() == (0, [])
    assert program.run() == (2, [])
    for name, damage in DAMAGES.items():
        for path in program.files(ending):
            path.write_bytes(damage(path.read_bytes()))
        hits, warnings = program.run()
        if not (name == "flipped" and ending == "nbi"):  # there it can hit a key, which is then another function's
            assert (hits, len(warnings)) == (0, 1), name
            assert str(program.cache) in warnings[0]
        assert program.run() == (2, []), f"not rebuilt after: {name}"


def test_code_of_an_older_source_is_not_taken_for_the_new_one(program):
    """As a full disk leaves it: a new index, and the data file of before."""
    program.run()
    old = {path: path.read_bytes() for path in program.files("nbc")}
    program.source.write_text(PROGRAM.replace("a + b", "a + b + 0 * a").replace("a - b", "a - b + 0 * a"))
    program.run()
    for path, data in old.items():
        path.write_bytes(data)
    assert program.run() == (0, [])
    assert program.run() == (2, [])


def mount(options: str, folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def full_disk(program):
    mount("size=8k", program.cache)
    yield
    subprocess.run(["umount", program.cache], check=True)


def test_a_full_disk_costs_only_the_cache(program, full_disk):
    for _ in range(2):
        hits, warnings = program.run()
        assert (hits, len(warnings)) == (0, 1)
        assert str(program.cache) in warnings[0] and "No space left" in warnings[0]


def test_a_damaged_cache_on_a_read_only_disk_is_done_without(program, tmp_path):
    """The disk becomes read-only after the folder was chosen: simulated, since numba would choose another folder."""
    program.run()
    for path in program.files("nbi"):
        path.write_bytes(b"")
    refuse = """
import errno, os, tempfile
import numba.core.caching as caching
def refuse(*arguments, **options):
    raise OSError(errno.EROFS, "Read-only file system")
os.unlink = caching.IndexDataCacheFile._save_index = caching.IndexDataCacheFile._save_data = refuse
"""
    (tmp_path / "sitecustomize.py").write_text(refuse)
    hits, warnings = program.run(PYTHONPATH=str(tmp_path))
    assert (hits, len(warnings)) == (0, 1)
    assert str(program.cache) in warnings[0]


def test_no_folder_that_can_be_written(program):
    """All of numba's choices below a file, so that not even root can make them."""
    blocked = program.source / "below-a-file"
    hits, warnings = program.run(
        NUMBA_CACHE_DIR=str(blocked), NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator", HOME=str(blocked)
    )
    assert (hits, len(warnings)) == (0, 1)
    assert str(blocked) in warnings[0]
