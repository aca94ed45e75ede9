"""Compose a configuration as run.py would, without running anything."""

from tagc.cli.entry import compose_config

__all__ = ["compose_config"]
