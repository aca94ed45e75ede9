"""File names and output with any characters, whatever the locale says."""

from __future__ import annotations

import os
import sys


def ensure_utf8() -> None:
    """Start this command again in Python's UTF-8 mode if its locale has another encoding (``LC_ALL=C`` and the like).

    There Python may neither print nor pass on a name with other characters. The processes that the command starts
    inherit the mode. An output encoding of the user's own (``PYTHONIOENCODING=ascii``) stays, and what it cannot write
    is escaped. To be called first in a command: nothing that was done before is kept.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":  # else the mode was refused (-E)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    if encoding:
        os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
