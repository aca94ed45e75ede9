"""Batches: row i of step t depends on (seed, t, i) alone, so any number of ranks trains on the same global batches.

Shape letters: B sequences of one rank and step, T context, N training tokens, W windows per epoch.

An epoch cuts the tokens into W windows of T, starting at an offset that differs per epoch, and visits each window once
in a pseudo-random order. The order is a keyed permutation that is computed, never stored, so a position in the data is
one integer whatever the size of the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tagc.data.tokens import Tokens
from tagc.errors import UserError

Batch = tuple[torch.Tensor, torch.Tensor]

FEISTEL_ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): a bijection of uint64 that scrambles every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _derive_keys(seed: int, epoch: int, count: int) -> np.ndarray:
    """``count`` uint64 keys for one epoch. numpy's streams may change between releases, this must not."""
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    state = _mix(_mix(state + GOLDEN) ^ np.uint64(epoch))
    return _mix(state + GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def permute_indices(indices: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where a keyed permutation of ``range(size)`` sends ``indices`` (int64, any shape, each in [0, size)).

    A Feistel network is a bijection of the next power of four; walking its cycle until the value is below ``size``
    restricts it to ``range(size)`` (Black, Rogaway, "Ciphers with arbitrary finite domains", 2002). ``keys``: uint64,
    one per round. Costs a few passes over ``indices``, no storage.
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    values = indices.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


class TrainLoader:
    """Endless ``(batch, state)``: batch = (inputs, targets), int64 [B, T] each, B = global_batch / ranks.

    Targets are the inputs shifted by one token. Concatenating the ranks' batches in rank order gives the global batch,
    the same for every number of ranks. ``state`` is a small dict of plain values, taken after the batch: a loader given
    it by :meth:`load_state` continues with the next batch, also at another number of ranks.
    """

    def __init__(self, tokens: Tokens, context: int, global_batch: int, rank: int, ranks: int, seed: int) -> None:
        """Errors: ``UserError`` if the data holds no sequence of ``context`` + 1 tokens or the ranks cannot share."""
        if global_batch % ranks or not 0 <= rank < ranks:
            raise UserError(
                f"trainer.global_batch={global_batch} cannot be shared by rank {rank} of cluster.ranks={ranks}; "
                "choose a multiple of the ranks"
            )
        fitting = (len(tokens) - 1) // context
        if fitting < 1:
            raise UserError(
                f"model.context={context} is longer than the training data: {', '.join(tokens.files)} holds "
                f"{len(tokens):,} tokens and a sequence needs {context + 1:,}; choose a smaller context or more data"
            )
        self._tokens, self._context, self._seed = tokens, context, seed
        self._global_batch, self._rank, self._ranks = global_batch, rank, ranks
        self.windows = max(1, fitting - 1)  # one fewer than fit, so that the offset has room to move
        self._offsets = min(context, len(tokens) - self.windows * context)  # legal offsets are [0, this)
        self._step = 0

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Continue from the current step; never ends."""
        while True:
            batch = self._read_batch(self._step)
            self._step += 1
            yield batch, self._make_state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch that came with ``state``.

        Errors: ``UserError`` if it is not a loader's state or belongs to another seed, batch, context or data.
        """
        step = state.get("step") if isinstance(state, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UserError(f"not the state of a data loader: {state!r}; the checkpoint is damaged, resume another one")
        expected = {**self._make_state(), "step": step}
        for key in sorted({*expected, *state}):
            if state.get(key) != expected.get(key):
                raise UserError(
                    f"the checkpoint's data order was drawn with {key}={state.get(key)!r}, this run has "
                    f"{key}={expected.get(key)!r}; resume with the same seed, batch, context and data, or start "
                    "a new run"
                )
        self._step = step

    def _make_state(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "seed": self._seed,
            "global_batch": self._global_batch,
            "context": self._context,
            "tokens": len(self._tokens),
            "fingerprint": self._tokens.fingerprint,
        }

    def _read_batch(self, step: int) -> Batch:
        rows = self._global_batch // self._ranks
        first = step * self._global_batch + self._rank * rows
        starts = self._locate(np.arange(first, first + rows))
        return _read_sequences(self._tokens, starts.tolist(), self._context)

    def _locate(self, samples: np.ndarray) -> np.ndarray:
        """First token (int64, same shape) of the run's samples with these numbers. A batch may touch several epochs."""
        epochs, positions = np.divmod(samples, self.windows)
        starts = np.empty_like(samples)
        for epoch in np.unique(epochs):
            keys, here = _derive_keys(self._seed, epoch, FEISTEL_ROUNDS + 1), epochs == epoch
            windows = permute_indices(positions[here], self.windows, keys[1:])
            starts[here] = int(keys[0]) % self._offsets + windows * self._context
        return starts


def validation_batch(tokens: Tokens, context: int, sequences: int) -> Batch:
    """(inputs, targets), int64 [sequences, T] each: evenly spaced, without overlap, the same for every run.

    Errors: ``UserError`` if the validation data is too short for that many sequences.
    """
    if len(tokens) < sequences * context + 1:
        raise UserError(
            f"data.val_sequences={sequences} of model.context={context} need {sequences * context + 1:,} validation "
            f"tokens, but {', '.join(tokens.files)} holds {len(tokens):,}; choose a smaller context or more data"
        )
    room = len(tokens) - 1 - context
    starts = [row * room // max(1, sequences - 1) for row in range(sequences)]
    return _read_sequences(tokens, starts, context)


def _read_sequences(tokens: Tokens, starts: list[int], context: int) -> Batch:
    rows = torch.from_numpy(np.stack([tokens.read(start, context + 1) for start in starts]))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
