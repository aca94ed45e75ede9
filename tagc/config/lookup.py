"""Questions about keys by their dotted names, answered from the declarations of the schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from tagc.config.keys import Affects, Declaration, Resume
from tagc.config.schema import Config
from tagc.errors import UserError

_IN_WHEEL = Path(__file__).parents[1] / "conf"  # where setup.py puts it
CONF_DIR = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[2] / "conf"  # the options of every group


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


def load_option(section: str, name: str) -> dict[str, Any]:
    """What ``conf/<section>/<name>.yaml`` sets, and its name. Errors: ``UserError`` naming the options there are."""
    try:
        import yaml  # here: the schema itself must load where only torch, numpy and numba are installed
    except ImportError:
        raise UserError(f"{section}={name} is read from conf/, which needs PyYAML: pip install 'tagc[lab]'") from None
    path = CONF_DIR / section / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(option.stem for option in path.parent.glob("*.yaml")))
        raise UserError(f"{section}={name} is not known; choose one of {known}")
    return {**(yaml.safe_load(path.read_text(encoding="utf-8")) or {}), "name": name}


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


def key_of(override: str) -> str:
    """The key that an override sets.

    >>> key_of("++compressor.sparsity=0.9")
    'compressor.sparsity'
    """
    return override.partition("=")[0].lstrip("+")


def find_unused(config: Config, overrides: Iterable[str]) -> list[str]:
    """Those of ``overrides`` that set a key which the chosen option of its group does not use."""
    return [override for override in overrides if not uses(_option_of(config, key_of(override)), key_of(override))]


def _option_of(config: Config, name: str) -> str:
    return getattr(getattr(config, name.rpartition(".")[0], None), "name", "")


def refuse_unused(config: Config, overrides: Iterable[str]) -> None:
    """Refuse a key that was given explicitly and that the chosen method would ignore.

    Errors: ``UserError`` naming the key, the keys that the method uses and the methods that use the key.
    """
    for override in find_unused(config, overrides):
        name = key_of(override)
        section, option = KEYS[name].section, _option_of(config, name)
        used = ", ".join(keys_used_by(option, section)) or f"no key of {section}"
        others = ", ".join(KEYS[name].declaration.used_by or ())
        raise UserError(
            f"{override}: {section}={option} does not use {name}; it uses {used}. Drop {name}, or choose a {section} "
            f"that uses it: {others}"
        )
