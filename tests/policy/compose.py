"""Compose a configuration as run.py would, without running anything."""

from __future__ import annotations

from collections.abc import Iterable

from hydra import compose, initialize_config_dir

from tagc import cli
from tagc.config import Config


def compose_config(overrides: Iterable[str]) -> Config:
    """The validated configuration that ``python run.py OVERRIDES`` would run."""
    cli.register_schema()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.to_config(compose("config", overrides=list(overrides)))
