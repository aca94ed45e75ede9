"""Hydra's entry: ``python run.py ...`` in a checkout, ``python -m tagc.cli ...`` where tagc is installed."""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig

from tagc.cli import entry
from tagc.cli.sweeper import register_sweeper
from tagc.host.preflight import drop_thread_binding
from tagc.host.utf8 import ensure_utf8


@hydra.main(version_base="1.3", config_path=str(entry.CONF_DIR), config_name="config")
def main(composed: DictConfig) -> None:
    """One run; Hydra calls this once per job."""
    entry.launch_job(entry.to_config(composed))


def start() -> int:
    """Compose the configuration, validate it, run it; returns the exit code."""
    ensure_utf8()
    if message := drop_thread_binding(os.environ):
        sys.stderr.write(message + "\n")
    entry.register_schema()
    register_sweeper()
    return entry.run(main)


if __name__ == "__main__":
    sys.exit(start())
