"""Packed values and blocks element by element: what the backends are compared with. Slow, and plain to read."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def add_old_residual(gradient_WN: Tensor, residual_WN: Tensor, decay: float) -> Tensor:
    """float32 [W, N]: ``gradient + decay * residual``; ``decay=0`` ignores the residual, NaN in it included."""
    return gradient_WN + decay * residual_WN.float() if decay else gradient_WN.clone()


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
