"""The name of a run's method and of the settings in which it differs from its options in conf/: ``tagc2 sparsity=0.9``.

Written to ``manifest.json`` when a run starts, so that a default that changes later renames no recorded run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from tagc.config import CONF_DIR, KEYS, uses


@cache
def _option_defaults(section: str, name: str) -> dict[str, Any]:
    """Value of every key of a section, by its dotted name, of the option ``name`` as it is today."""
    defaults = {key: item.default for key, item in KEYS.items() if item.section == section}
    path = CONF_DIR / section / f"{name}.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return defaults | {f"{section}.{key}": value for key, value in values.items()} | {f"{section}.name": name}


def label_arm(config: Mapping[str, Any]) -> str:
    """The method and each setting in which it differs from its option, in the order of ``config``.

    Then the way of the weights, if it is not ``full``. config: flat keys. Unused keys are left out.

    >>> label_arm({"compressor.name": "tagc2", "compressor.sparsity": 0.9, "compressor.ratio": 2.0, "seed": 0})
    'tagc2 sparsity=0.9'
    >>> label_arm({"compressor.name": "int4", "weights.name": "delta4", "weights.block": 64})
    'int4 weights=delta4 weights.block=64'
    """
    words = [config["compressor.name"], *_list_changes(config, "compressor", prefix="")]
    weights = config.get("weights.name", "full")
    if weights != "full":
        words += [f"weights={weights}", *_list_changes(config, "weights", prefix="weights.")]
    return " ".join(words)


def _list_changes(config: Mapping[str, Any], section: str, prefix: str) -> list[str]:
    option = config[f"{section}.name"]
    defaults, changed = _option_defaults(section, option), []
    for key, value in config.items():
        in_section, _, short = key.rpartition(".")
        if in_section == section and uses(option, key) and (key not in defaults or defaults[key] != value):
            changed.append(f"{prefix}{short}={str(value).lower() if isinstance(value, bool) else value}")
    return changed
