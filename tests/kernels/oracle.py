"""Every operation from its definition, element by element: what all backends are compared with, the reference too.

Slow, plain to read, and without any code of tagc: only a layout's ``rows``, ``lanes`` and ``cells`` come from there.
Sums are taken in float64.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor


def add_old_residual(gradient_WN: Tensor, residual_WN: Tensor, decay: float) -> Tensor:
    """float32 [W, N]: ``gradient + decay * residual``; ``decay=0`` ignores the residual, NaN in it included."""
    return gradient_WN + decay * residual_WN.float() if decay else gradient_WN.clone()


def read_bits(index_B, numel: int) -> list[int]:
    """0 or 1 for each element: bit i % 8 of byte i // 8."""
    return [byte >> bit & 1 for byte in index_B.tolist() for bit in range(8)][:numel]


def write_bits(bits: list[int]) -> Tensor:
    """The inverse of :func:`read_bits`."""
    index = [0] * math.ceil(len(bits) / 8)
    for i, bit in enumerate(bits):
        index[i // 8] += bit << (i % 8)
    return torch.tensor(index, dtype=torch.uint8)


# --- sketches ---------------------------------------------------------------------------------------------------------


def add_owed_residual(gradient_WN: Tensor, carry_WN: Tensor, owed_WB: Tensor, decay: float) -> Tensor:
    """float32 [W, N]: ``gradient + decay * carry`` where the carry is owed, rounded once; ``decay=0`` ignores it."""
    if decay == 0:
        return gradient_WN.clone()
    numel = gradient_WN.shape[1]
    owed_WN = torch.tensor([read_bits(owed_B, numel) for owed_B in owed_WB]).bool()
    old_WN = torch.where(owed_WN, carry_WN.double(), 0.0)
    return (gradient_WN.double() + torch.tensor(decay, dtype=torch.float32).double() * old_WN).float()


def splitmix64(key: int) -> int:
    """The splitmix64 finaliser on 64-bit words."""
    word = (key + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


@functools.cache
def hash_rows(rows: int, cells: int, seed: int) -> list[list[tuple[int, int]]]:
    """(cell, sign) of every row in each of three hash rows: rows are dealt to the cells in the order of their keys."""
    hashed = []
    for h in range(3):
        salt = splitmix64(3 * seed + h)
        keys = [splitmix64(row ^ salt) for row in range(rows)]
        as_signed = sorted(range(rows), key=lambda row: (keys[row] + 2**63) % 2**64)
        places: list[tuple[int, int]] = [(0, 0)] * rows
        for turn, row in enumerate(as_signed):
            places[row] = (turn % cells, -1 if splitmix64(keys[row]) % 2 else 1)
        hashed.append(places)
    return hashed


def list_picks(i: int, layout: Any, seed: int) -> list[tuple[int, int]]:
    """(index into the flat sketch, sign) of element i in each hash row."""
    row, lane = divmod(i, layout.lanes)
    hashed = hash_rows(layout.rows, layout.cells, seed)
    return [((h * layout.cells + hashed[h][row][0]) * layout.lanes + lane, hashed[h][row][1]) for h in range(3)]


class Sketched(NamedTuple):
    """What :func:`encode_sketch` gives: the fields of a backend's EncodedSketch, then the new state."""

    index_WB: Tensor
    cells_WS: Tensor  # float64
    own_N: Tensor
    kept_W: Tensor
    residual_squared: Tensor  # float64
    carry_WN: Tensor  # float32
    owed_WB: Tensor


def encode_sketch(x_WN, threshold_W1, rank: int, layout: Any, seed: int, error_feedback: bool) -> Sketched:
    """What one rank sends of ``x``, and what it keeps."""
    ranks, numel = x_WN.shape
    index, owed, kept, squares = [], [], [], 0.0
    cells_WS, own_N = torch.zeros(ranks, 3 * layout.cells * layout.lanes, dtype=torch.float64), torch.zeros(numel)
    for w, threshold in enumerate(threshold_W1.flatten().expand(ranks).tolist()):
        values = x_WN[w].tolist()
        selected = [int(abs(x) >= threshold and x != 0) for x in values]
        kept.append(sum(selected))
        index.append(write_bits(selected if w != rank else [0] * numel))
        owed.append(write_bits([int(error_feedback and not bit) for bit in selected]))
        squares += sum(x * x for x, bit in zip(values, selected, strict=True) if error_feedback and not bit)
        cells = [0.0] * cells_WS.shape[1]
        for i in (i for i in range(numel) if selected[i]):
            if w == rank:
                own_N[i] = values[i]
                continue
            for cell, sign in list_picks(i, layout, seed):
                cells[cell] += sign * values[i]
        cells_WS[w] = torch.tensor(cells, dtype=torch.float64)
    squared = torch.tensor(squares, dtype=torch.float64)
    return Sketched(torch.stack(index), cells_WS, own_N, torch.tensor(kept), squared, x_WN, torch.stack(owed))


class Peeled(NamedTuple):
    """What :func:`decode_sketch` gives: the fields of a backend's DecodedSketch."""

    total_N: Tensor  # float64
    union: Tensor
    peers_union: Tensor
    unresolved_B: Tensor
    unresolved: Tensor


def decode_sketch(index_B, cells_S, own_N, layout: Any, seed: int, estimate: bool) -> Peeled:
    """Take elements that are alone in a cell, in any order, until none is; the rest cannot be separated."""
    numel, cells = len(own_N), cells_S.tolist()
    peers = read_bits(index_B, numel)
    picks = {i: list_picks(i, layout, seed) for i in range(numel) if peers[i]}
    inside: list[set[int]] = [set() for _ in cells]
    for i, places in picks.items():
        for cell, _ in places:
            inside[cell].add(i)
    total, waiting = own_N.tolist(), [cell for cell, elements in enumerate(inside) if len(elements) == 1]
    while waiting:
        found = waiting.pop()
        if len(inside[found]) != 1:
            continue
        i = next(iter(inside[found]))
        value = dict(picks[i])[found] * cells[found]
        total[i] += value
        for cell, sign in picks.pop(i):
            cells[cell] -= sign * value
            inside[cell].discard(i)
            waiting.append(cell)
    if estimate:
        for i, places in picks.items():
            total[i] += statistics.median(sign * cells[cell] for cell, sign in places)
    union = sum(bool(bit) or own != 0 for bit, own in zip(peers, own_N.tolist(), strict=True))
    left_B = write_bits([int(i in picks) for i in range(numel)])
    counts = torch.tensor([union, sum(peers), len(picks)])
    return Peeled(torch.tensor(total, dtype=torch.float64), counts[0], counts[1], left_B, counts[2])


# --- thresholds -------------------------------------------------------------------------------------------------------


def threshold_exact(x_WN: Tensor, density: float) -> Tensor:
    """[W, 1]: the magnitude that ``round(density * N)`` of a shard's values reach, at least one; NaN is the largest."""
    keep = max(1, round(density * x_WN.shape[1]))
    ordered = [sorted(map(abs, values), key=lambda x: (math.isnan(x), x), reverse=True) for values in x_WN.tolist()]
    return torch.tensor([[values[keep - 1]] for values in ordered])


def threshold_lognormal(x_WN: Tensor, density: float) -> Tensor:
    """[W, 1]: the quantile of a log-normal fitted to a shard's non-zero magnitudes, at most the largest of them."""
    thresholds = []
    for values in x_WN.tolist():
        nonzero = [abs(x) for x in values if x]
        if density * len(values) >= len(nonzero):
            thresholds.append(0.0)
            continue
        logs = [math.log(x) for x in nonzero]
        deviation = statistics.stdev(logs) if len(logs) > 1 else 0.0
        away = statistics.NormalDist().inv_cdf(1 - density * len(values) / len(nonzero))
        thresholds.append(min(math.exp(statistics.fmean(logs) + deviation * away), max(nonzero)))
    return torch.tensor(thresholds)[:, None]


# --- packed values ----------------------------------------------------------------------------------------------------


def encode_packed(x_WN, threshold_W1, rank, capacity, wire_dtype, error_feedback):
    """(index_WB, values_WC, own_N, kept_W, residual_WN in float32) of one rank."""
    ranks, numel = x_WN.shape
    cast_WN = x_WN.to(wire_dtype).float()
    index = [[0] * math.ceil(numel / 8) for _ in range(ranks)]
    values_WC = torch.zeros(ranks, capacity, dtype=wire_dtype)
    own_N, residual_WN = torch.zeros(numel), torch.zeros_like(x_WN)
    kept = [0] * ranks
    for w, threshold in enumerate(threshold_W1.flatten().expand(ranks).tolist()):
        for i, x in enumerate(x_WN[w].tolist()):
            if not (abs(x) >= threshold and x != 0):
                residual_WN[w, i] = x if error_feedback else 0.0
            elif w == rank:
                own_N[i] = x
                kept[w] += 1
            elif kept[w] < capacity:
                index[w][i // 8] += 1 << (i % 8)
                values_WC[w, kept[w]] = cast_WN[w, i]
                residual_WN[w, i] = x_WN[w, i] - cast_WN[w, i]
                kept[w] += 1
            else:
                residual_WN[w, i] = x
    return torch.tensor(index, dtype=torch.uint8), values_WC, own_N, torch.tensor(kept), residual_WN


def decode_packed(index_WB, values_WC, own_N):
    """(total_N, size of the union) at one owner."""
    total_N, hit_N = own_N.clone(), (own_N != 0).tolist()
    for w, index in enumerate(index_WB.tolist()):
        taken = 0
        for i in range(len(own_N)):
            if index[i // 8] >> (i % 8) & 1:
                total_N[i] += values_WC[w, taken].float()
                taken += 1
                hit_N[i] = True
    return total_N, sum(hit_N)


# --- blocks -----------------------------------------------------------------------------------------------------------


def encode_blocks(x_WN, rank, bits, block):
    """(codes_WM, scales_WK, own_N, residual_WN in float32) of one rank."""
    ranks, numel = x_WN.shape
    largest = 127 if bits == 8 else 7
    codes = [[0] * math.ceil(numel * bits / 8) for _ in range(ranks)]
    scales_WK = torch.zeros(ranks, math.ceil(numel / block))
    residual_WN = torch.zeros_like(x_WN)
    for w in range(ranks):
        for k in range(scales_WK.shape[1]):
            if w == rank:
                continue
            part = slice(k * block, (k + 1) * block)
            x = x_WN[w, part]
            scale = x.abs().max() / largest if x.isfinite().all() else torch.tensor(0.0)
            q = (x / scale).round().clamp(-largest, largest) if scale > 0 else torch.zeros_like(x)
            scales_WK[w, k] = scale
            residual_WN[w, part] = x - q * scale
            for offset, code in enumerate(q.to(torch.int64).tolist()):
                position = k * block + offset
                if bits == 8:
                    codes[w][position] = code & 255
                else:
                    codes[w][position // 2] += (code & 15) << (position % 2 * 4)
    return torch.tensor(codes, dtype=torch.uint8), scales_WK, x_WN[rank].clone(), residual_WN


def decode_blocks(codes_WM, scales_WK, own_N, bits, block):
    """total_N at one owner."""
    total_N = own_N.clone()
    for w, codes in enumerate(codes_WM.tolist()):
        values = []
        for i in range(len(own_N)):
            code = codes[i * bits // 8]
            if bits == 4:
                code = code >> (i % 2 * 4) & 15
            values.append(code - (1 << bits) * (code >> (bits - 1)))
        total_N += torch.tensor(values) * scales_WK[w].repeat_interleave(block)[: len(own_N)]
    return total_N
