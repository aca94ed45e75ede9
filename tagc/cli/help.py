"""What ``run.py --help`` says about the keys: a line for each, from its declaration."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from tagc.config import KEYS, Config, Key

_WIDTH = 116


def register_help() -> None:
    """Make ``${tagc_keys:}`` known to OmegaConf; ``hydra.help.template`` in conf/config.yaml uses it."""
    OmegaConf.register_new_resolver("tagc_keys", describe_keys, replace=True)


def describe_keys() -> str:
    """Every key with its default, meaning and legal values, by section."""
    sections = {item.name: (item.default_factory or str).__doc__ for item in fields(Config) if item.name not in KEYS}
    lines: list[str] = []
    for section in ("", *sections):
        title = f"{section}: {sections[section]}" if section else "Keys without a section"
        lines += ["", title, *(line for key in KEYS.values() if key.section == section for line in _describe(key))]
    return "\n".join(lines[1:])


def _describe(key: Key) -> list[str]:
    declared = key.declaration
    legal = f" Legal: {declared.rule.text}." if declared.rule else ""
    users = f" Used by {', '.join(declared.used_by)}." if declared.used_by else ""
    text = f"{declared.help[0].upper()}{declared.help[1:]}.{legal}{users}"
    return [
        f"  {key.name}={_show(key.default)}",
        *textwrap.wrap(text, _WIDTH, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False),
    ]


def _show(value: Any) -> str:
    """A value as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
