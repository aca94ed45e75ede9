"""Questions about keys by their dotted names, answered from the declarations of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from tagc.config.keys import Affects, Declaration, Resume
from tagc.config.schema import Config


@dataclass(frozen=True)
class Key:
    """A key of the schema."""

    name: str  # dotted: ``compressor.sparsity``
    default: Any
    declaration: Declaration

    @property
    def section(self) -> str:
        """``compressor`` of ``compressor.sparsity``; empty for a key at the top."""
        return self.name.rpartition(".")[0]


def _default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _list_keys() -> dict[str, Key]:
    keys = {}
    for item in fields(Config):
        section = _default_of(item)
        if is_dataclass(section):
            for leaf in fields(section):
                name = f"{item.name}.{leaf.name}"
                keys[name] = Key(name, _default_of(leaf), leaf.metadata["declaration"])
        else:
            keys[item.name] = Key(item.name, section, item.metadata["declaration"])
    return keys


#: every key of the schema by its dotted name, in the schema's order
KEYS: dict[str, Key] = _list_keys()


def affects(key: str) -> Affects:
    """What a dotted key affects: ``numbers``, ``time``, ``record`` or ``nothing``.

    A key that the schema does not have, as in rows of another version, affects numbers: runs that differ in it are kept
    apart.

    >>> affects("compressor.sparsity"), affects("trainer.overlap"), affects("logging.wandb")
    ('numbers', 'time', 'nothing')
    """
    return KEYS[key].declaration.affects if key in KEYS else "numbers"


def is_operational(key: str) -> bool:
    """Whether a dotted key affects nothing of a result."""
    return affects(key) == "nothing"


def resumes(key: str) -> Resume:
    """Whether a run may continue a checkpoint that has another value of this key: ``fixed``, ``logged`` or ``free``."""
    return KEYS[key].declaration.resume if key in KEYS else "free"


def uses(option: str, key: str) -> bool:
    """Whether an option of the key's own group uses the key; true for a key that the schema does not have.

    >>> uses("tagc2", "compressor.sparsity"), uses("int8", "compressor.sparsity")
    (True, False)
    """
    used_by = KEYS[key].declaration.used_by if key in KEYS else None
    return used_by is None or option in used_by


def drop_unused(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys with their values; those that the chosen options do not use get their default.

    So configurations that differ only in such keys become equal.

    >>> drop_unused({"compressor.name": "int8", "compressor.sparsity": 0.9, "compressor.block": 64})
    {'compressor.name': 'int8', 'compressor.sparsity': 0.8, 'compressor.block': 64}
    """
    return {
        name: value if uses(str(flat.get(f"{name.rpartition('.')[0]}.name")), name) else KEYS[name].default
        for name, value in flat.items()
    }


def keys_used_by(option: str, section: str) -> list[str]:
    """The names, without the section, of the keys that an option of this section uses; ``name`` is not among them."""
    names = (name for name, key in KEYS.items() if key.section == section and uses(option, name))
    return [name.rpartition(".")[2] for name in names if not name.endswith(".name")]
