"""``python -m tests.launch.start WORKER RUN_DIR [NETWORK]``: launch a worker of :mod:`tests.launch.workers`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import tagc.data
from tagc.cli import entry as cli
from tagc.config import Config
from tagc.launch import launch
from tests.launch import workers


def main() -> None:
    """What run.py does after Hydra has composed."""
    config = Config()
    config.network.name = sys.argv[3] if len(sys.argv) > 3 else "paced"
    config.cluster.grace_s = 1.0  # `hang` has no steps
    config.cluster.max_restarts = 0
    summary = launch(config, Path(sys.argv[2]), getattr(workers, sys.argv[1]))
    sys.stdout.write(f"total={summary['total']}\n")


if __name__ == "__main__":
    # A shell starts what it puts in the background with SIGINT ignored, and these tests may be there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tagc.data.prepare = lambda config: config.name
    sys.exit(cli.run(main))
