"""The name of a run's method and of the settings in which it differs from its option in conf/: ``tagc2 sparsity=0.9``.

Written to ``manifest.json`` when a run starts, so that a default that changes later renames no recorded run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from tagc.config import CONF_DIR, KEYS, uses

SECTION = "compressor."
OPTIONS_DIR = CONF_DIR / "compressor"


@cache
def _option_defaults(name: str) -> dict[str, Any]:
    """Value of every compressor key, without its section, of the option ``name`` as it is today."""
    defaults = {key.removeprefix(SECTION): item.default for key, item in KEYS.items() if key.startswith(SECTION)}
    path = OPTIONS_DIR / f"{name}.yaml"
    return defaults | (yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}) | {"name": name}


def label_arm(config: Mapping[str, Any]) -> str:
    """The method and each setting in which it differs from its option, in the order of ``config``.

    config: flat keys. Keys that the method does not use are left out.

    >>> label_arm({"compressor.name": "tagc2", "compressor.sparsity": 0.9, "compressor.ratio": 2.0, "seed": 0})
    'tagc2 sparsity=0.9'
    """
    name = config["compressor.name"]
    defaults, changed = _option_defaults(name), []
    for key, value in config.items():
        short = key.removeprefix(SECTION)
        if key.startswith(SECTION) and uses(name, key) and (short not in defaults or defaults[short] != value):
            changed.append(f"{short}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join([name, *changed])
