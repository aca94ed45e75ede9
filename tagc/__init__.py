"""Transformer-aware gradient compression under PyTorch FSDP2: :func:`tagc.compress`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tagc.api import Compression, compress

__all__ = ["Compression", "compress"]


def __getattr__(name: str) -> Any:
    """Import the library when it is first used: ``import tagc`` alone loads nothing, not even torch."""
    if name not in __all__:
        raise AttributeError(f"module 'tagc' has no attribute {name!r}")
    from tagc import api

    return getattr(api, name)
