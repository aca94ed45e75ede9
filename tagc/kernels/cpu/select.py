"""The pass over gradient and state: add the residual, compare, keep the rest, pack the masks. One tile at a time."""

from __future__ import annotations

import numpy as np

from tagc.kernels.cpu.bits import fused_multiply_add, gather_bits, load, spread_bits, store
from tagc.kernels.cpu.compiled import compiled

_ZERO = np.float32(0)
_ONES = np.uint64(0x0101010101010101)


@compiled()
def copy_values(source: np.ndarray, target: np.ndarray) -> None:
    """Fill ``target`` from the start of ``source``. (A slice assignment would check for overlap and copy twice.)"""
    for i in range(len(target)):
        target[i] = source[i]


@compiled()
def add_owed(gradient: np.ndarray, carry: np.ndarray, flags: np.ndarray, decay: np.float32) -> None:
    """``gradient += decay * carry`` where the flag is set."""
    for i in range(len(gradient)):
        old = load(carry, i) if flags[i] else _ZERO
        gradient[i] = fused_multiply_add(decay, old, gradient[i])


@compiled(fastmath={"reassoc"})
def split_tile(
    gradient: np.ndarray,
    carry: np.ndarray,
    flags: np.ndarray,
    decay: np.float32,
    threshold: np.float32,
    chosen: np.ndarray,
) -> np.float32:
    """Split ``x = gradient + decay * residual`` into what is sent and what stays; returns the squares of the latter.

    flags: in, which elements of the carry are owed; out, which elements are sent. carry: out, x. chosen: out, x where
    sent, else zero. The sum of squares may be taken in any order, which makes it a vector sum; all else is one
    operation per element. NaN compares false: it is never sent.
    """
    squares = _ZERO
    for i in range(len(gradient)):
        old = load(carry, i) if flags[i] else _ZERO
        x = fused_multiply_add(decay, old, gradient[i])
        send = (abs(x) >= threshold) & (x != 0)
        store(carry, i, x)
        flags[i] = send
        chosen[i] = x if send else _ZERO
        rest = _ZERO if send else x
        squares += rest * rest
    return squares


@compiled()
def select_tile(
    gradient: np.ndarray,
    carry: np.ndarray,
    owed_B: np.ndarray,
    index_B: np.ndarray,
    decay: np.float32,
    threshold: np.float32,
    error_feedback: bool,
    chosen: np.ndarray,
    words: np.ndarray,
) -> tuple[int, np.float32]:
    """One tile of :func:`split_tile` with its bitmaps: owed_B in and out, index_B out. Returns (sent, squares).

    words: scratch of eight flags each. ``decay=0`` ignores the old state.
    """
    numel, count = len(gradient), len(index_B)
    words, flags = words[:count], words[:count].view(np.uint8)
    if decay != 0:
        spread_bits(owed_B, words)
    else:
        words[:] = np.uint64(0)
    flags[numel:] = 0
    squares = split_tile(gradient, carry, flags[:numel], decay, threshold, chosen[:numel])
    sent = gather_bits(words, index_B)
    if error_feedback:
        for b in range(count):
            words[b] ^= _ONES
        flags[numel:] = 0
        gather_bits(words, owed_B)
    else:
        owed_B[:] = 0
        squares = _ZERO
    return sent, squares
