"""Tokens for training: make or check the files once, then draw the same global batch at any number of ranks.

The launcher calls :func:`prepare` in one process before the ranks start. Each rank then opens the files with
:func:`open_tokens` and reads its rows through :class:`TrainLoader` and :func:`validation_batch`.
"""

from tagc.data.info import DataInfo
from tagc.data.loader import TrainLoader, validation_batch
from tagc.data.prepare import prepare
from tagc.data.tokens import Tokens, open_tokens

__all__ = ["DataInfo", "Tokens", "TrainLoader", "open_tokens", "prepare", "validation_batch"]
