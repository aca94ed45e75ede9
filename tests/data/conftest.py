"""Small token files, and a cache directory that no test shares."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch) -> Path:
    """The user's cache directory during a test."""
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


def write_raw(path: Path, ids) -> Path:
    """A nanoGPT file."""
    path.write_bytes(np.asarray(ids, dtype="<u2").tobytes())
    return path


def write_shard(path: Path, ids, *, count: int | None = None, version: int = 1) -> Path:
    """A modded-nanogpt shard; ``count`` and ``version`` can lie."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype="<u2").tobytes())
    return path
