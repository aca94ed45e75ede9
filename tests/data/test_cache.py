"""Two processes that need the same derived files."""

import os
import threading
import time

from tagc.data import cache
from tagc.data.cache import ensure_folder, write_manifest


def test_who_waits_says_for_whom(tmp_path, monkeypatch, caplog):
    """Once, and only if it takes long."""
    monkeypatch.setattr(cache, "SILENT_WAIT_S", 0.2)
    building = threading.Event()

    def build(folder):
        (folder / "x").write_text("x")
        write_manifest(folder, {}, ["x"])
        building.set()
        time.sleep(1)

    first = threading.Thread(target=ensure_folder, args=(tmp_path / "tokens", build))
    with caplog.at_level("INFO", "tagc"):
        first.start()
        assert building.wait(10)
        ensure_folder(tmp_path / "tokens", lambda folder: folder.rename("built twice"))
        first.join()
        ensure_folder(tmp_path / "tokens", lambda folder: folder.rename("built twice"))
    (line,) = [message for message in caplog.messages if "waiting" in message]
    assert f"waiting for process {os.getpid()} on " in line and str(tmp_path / "tokens") in line
    assert not (tmp_path / "tokens.holder").exists()
