"""Reads W&B's offline logs with the library's own reader, `wandb leet inspect`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a ``.wandb`` file."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def history_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a run's history, in the order of the log."""
    return [record["history"]["item"] for record in records if record["type"] == "history"]
