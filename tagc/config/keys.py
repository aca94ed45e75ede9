"""How a configuration key is declared: its default, meaning, legal values, what it affects and who uses it.

:func:`key` makes the dataclass field, :data:`KEYS` in :mod:`tagc.config.lookup` lists all of them. Validation, a sweep
point's identity, the resume check, the analysis and ``run.py --help`` read the declaration; none has a list of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

#: ``numbers``: what is learned. ``time``: how long a step takes, not what is learned. ``record``: neither, but which of
#: a run's steps its summary and rows cover. ``nothing``: how the run is operated and logged.
Affects = Literal["numbers", "time", "record", "nothing"]
#: whether a run may continue a checkpoint that has another value: ``fixed`` no, ``logged`` yes, with a line in the log
Resume = Literal["fixed", "logged", "free"]

_RESUME: dict[Affects, Resume] = {"numbers": "fixed", "time": "logged", "record": "free", "nothing": "free"}


@dataclass(frozen=True)
class Rule:
    """The legal values of a key."""

    holds: Callable[[Any], bool]
    text: str  # for messages and help: ``an integer >= 1``


@dataclass(frozen=True)
class Declaration:
    """What is declared about a key beside its type and default."""

    help: str  # meaning and unit
    rule: Rule | None = None  # None: the type says it all
    affects: Affects = "numbers"
    used_by: tuple[str, ...] | None = None  # options of the key's own group, such as methods; None: all of them
    resume: Resume = "fixed"


def key(
    default: Any,
    help: str,
    rule: Rule | None = None,
    *,
    affects: Affects = "numbers",
    used_by: tuple[str, ...] | None = None,
    resume: Resume | None = None,
) -> Any:
    """A dataclass field with its :class:`Declaration`; ``resume`` follows from ``affects`` if it is not given."""
    declaration = Declaration(help, rule, affects, used_by, resume or _RESUME[affects])
    metadata = {"declaration": declaration}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least(least: int, note: str = "") -> Rule:
    """Integers from ``least`` on."""
    return Rule(lambda value: value >= least, f"an integer >= {least}{note}")


def within(low: float, high: float, what: str, *, open_low: bool = False, open_high: bool = False) -> Rule:
    """Numbers from ``low`` to ``high``, without an end that is open; ``what`` is the whole text."""

    def holds(value: float) -> bool:
        return (low < value if open_low else low <= value) and (value < high if open_high else value <= high)

    return Rule(holds, what)


def one_of(*choices: str) -> Rule:
    """One of these names."""
    return Rule(lambda value: value in choices, "one of " + ", ".join(choices))


def or_null(rule: Rule, note: str = "") -> Rule:
    """What ``rule`` allows, or no value."""
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.text}, or null{note}")
