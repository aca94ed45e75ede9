"""What makes two points of a sweep the same run: equal values of all keys that affect a result and are used."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tagc.config import Config, drop_unused, flatten, is_operational, to_dict

ID_LENGTH = 8  # hexadecimal digits: among 1,000 points two meet by chance in 1 of 8,600 sweeps, and are then refused
MAX_NAME = 40  # characters of a name in a folder's


@dataclass(frozen=True)
class Point:
    """One job of a sweep."""

    number: int  # 0-based in the complete list, what ``sweep.only`` takes
    overrides: tuple[str, ...]  # what Hydra composes it from
    config: Config
    run_dir: Path

    @property
    def shown(self) -> list[str]:
        """The overrides that say what it runs."""
        return [word for word in self.overrides if not word.startswith(("hydra.", "sweep."))]

    @property
    def settings(self) -> str:
        """The same as one text."""
        return " ".join(self.shown)


def science_config(config: Config) -> dict[str, Any]:
    """The dotted keys that affect a run's result, with their values; a key that nothing uses has its default."""
    return {key: value for key, value in drop_unused(flatten(to_dict(config))).items() if not is_operational(key)}


def hash_config(config: Config) -> str:
    """The identity of a run, :data:`ID_LENGTH` hexadecimal digits, whatever the order of the overrides."""
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in science_config(config).items()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:ID_LENGTH]


def name_folder(config: Config) -> str:
    """A point's folder inside the sweep's: ``tagc2-10gbps-nano-seed0-1a2b3c4d``. The hash decides.

    Names that a user chose are cut and lose what no file name should hold.
    """
    names = (config.compressor.name, config.bandwidth.label, config.model.name)
    parts = (re.sub(r"[^A-Za-z0-9_.+]", "_", name)[:MAX_NAME] for name in names)
    return "-".join((*parts, f"seed{config.seed}", hash_config(config)))
