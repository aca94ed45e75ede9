"""Codec backends behind one set of operations, chosen by name.

A backend is a module with the functions of :mod:`tagc.kernels.reference`. ``auto`` takes the fastest one that can run
on the device; it is resolved once and recorded. Asking for one by name that cannot run is an error, never a fallback.
"""

from __future__ import annotations

from types import ModuleType

from tagc.errors import UserError
from tagc.kernels import reference

BACKENDS: dict[str, ModuleType] = {"reference": reference}


def resolve_backend(name: str) -> tuple[str, ModuleType]:
    """The name and module of the backend to use. Errors: ``UserError`` for an unknown name."""
    if name == "auto":
        name = "reference"
    if name not in BACKENDS:
        raise UserError(f"kernels={name} is not a backend; choose auto or {', '.join(BACKENDS)}")
    return name, BACKENDS[name]
