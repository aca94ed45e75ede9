"""Codec backends behind one set of operations, chosen by name.

A backend is a module with the functions of :mod:`tagc.kernels.reference`. ``auto`` takes the fastest one that can run
on the device; it is resolved once and recorded. Asking for one by name that cannot run is an error, never a fallback.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from tagc.errors import UserError


@dataclass(frozen=True)
class Backend:
    """A module that is imported when it is asked for, and the devices whose tensors it takes."""

    module: str
    devices: tuple[str, ...]

    def load(self, name: str) -> ModuleType:
        """Import it. Errors: ``ImportError`` for a missing package; ``UserError`` if compiled code has no place."""
        try:
            return import_module(self.module)
        except RuntimeError as error:  # numba finds neither the package's folder nor the user's cache writable
            raise UserError(
                f"kernels={name} cannot start: {error}; set NUMBA_CACHE_DIR to a writable folder, or kernels=reference"
            ) from error


BACKENDS: dict[str, Backend] = {
    "reference": Backend("tagc.kernels.reference", ("cpu", "cuda")),
    "cpu": Backend("tagc.kernels.cpu", ("cpu",)),
    "triton": Backend("tagc.kernels.triton", ("cuda",)),
}
FASTEST_FIRST = ("triton", "cpu", "reference")  # the order in which ``auto`` tries


def resolve_backend(name: str, device_type: str = "cpu") -> tuple[str, ModuleType]:
    """The name and module of the backend to use on ``device_type``; ``auto`` passes over what is not installed.

    Errors: ``UserError`` for an unknown name, and for a backend asked for by name that cannot run, with the reason.
    """
    if name == "auto":
        return _resolve_fastest(device_type)
    if name not in BACKENDS:
        raise UserError(f"kernels={name} is not a backend; choose auto or {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    if device_type not in backend.devices:
        raise UserError(f"kernels={name} works on {' or '.join(backend.devices)}, not on {device_type}; choose auto")
    try:
        return name, backend.load(name)
    except ImportError as error:
        raise UserError(f"kernels={name} cannot run here: {error}; install it, or set kernels=reference") from error


def _resolve_fastest(device_type: str) -> tuple[str, ModuleType]:
    for name in FASTEST_FIRST:
        if device_type in BACKENDS[name].devices:
            try:
                return name, BACKENDS[name].load(name)
            except ImportError:
                continue
    raise UserError(f"kernels=auto has no backend for {device_type}; choose one of {', '.join(BACKENDS)}")
