"""Decoders written from ``tagc/codec/WIRE_FORMAT.md`` alone, in numpy, on payloads of the reference backend."""

import numpy as np
import pytest
import torch

from tagc.codec.hashing import build_hash_table, plan_layout
from tagc.kernels import reference

# --- decoders: nothing of tagc, only bytes -----------------------------------------------------------------------


def read_bitmap(data: bytes, numel: int) -> np.ndarray:
    return np.array([data[i // 8] >> (i % 8) & 1 for i in range(numel)], dtype=bool)


def read_values(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "float32":
        return np.frombuffer(data, "<f4")
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")  # bfloat16: the upper half of an fp32


def read_packed(bitmap: bytes, values: bytes, dtype: str, numel: int) -> np.ndarray:
    out, sent = np.zeros(numel, np.float32), read_bitmap(bitmap, numel)
    out[sent] = read_values(values, dtype)[: sent.sum()]
    return out


def read_blocks(codes: bytes, scales: bytes, bits: int, block: int, numel: int) -> np.ndarray:
    if bits == 8:
        q = [byte - 256 if byte > 127 else byte for byte in codes]
    else:
        halves = [half for byte in codes for half in (byte & 15, byte >> 4)]
        q = [half - 16 if half > 7 else half for half in halves]
    scale = read_values(scales, "float32")
    return np.array([np.float32(q[i]) * scale[i // block] for i in range(numel)], np.float32)


def mix(z: int) -> int:
    word = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & word
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & word
    return z ^ z >> 31


def hash_row(h: int, rows: int, cells: int, seed: int) -> tuple[list[int], list[int]]:
    """cell and sign of each row."""
    keys = [mix(row ^ mix(3 * seed + h)) for row in range(rows)]
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    cell = [0] * rows
    for place, row in enumerate(sorted(range(rows), key=signed.__getitem__)):
        cell[row] = place % cells
    return cell, [-1 if mix(key) & 1 else 1 for key in keys]


def peel(union: np.ndarray, sums: np.ndarray, lanes: int, ratio: float, seed: int) -> dict[int, float]:
    """Position to value, of all that can be separated."""
    rows = -(-len(union) // lanes)
    cells = max(1, int(np.ceil(rows / (3 * ratio))))
    hashes = [hash_row(h, rows, cells, seed) for h in range(3)]

    def places(i: int) -> list[tuple[int, int]]:
        row, lane = divmod(i, lanes)
        return [((h * cells + cell[row]) * lanes + lane, sign[row]) for h, (cell, sign) in enumerate(hashes)]

    rest, holds = sums.astype(np.float64), [set() for _ in sums]
    for i in np.flatnonzero(union).tolist():
        for cell, _ in places(i):
            holds[cell].add(i)
    found: dict[int, float] = {}
    pure = [cell for cell, held in enumerate(holds) if len(held) == 1]
    while pure:
        cell = pure.pop()
        if len(holds[cell]) != 1:
            continue
        (i,) = holds[cell]
        found[i] = value = dict(places(i))[cell] * rest[cell]
        for other, sign in places(i):
            rest[other] -= sign * value
            holds[other].discard(i)
            if len(holds[other]) == 1:
                pure.append(other)
    return found


# --- payloads ----------------------------------------------------------------------------------------------------


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def gradients(ranks: int, numel: int, seed: int) -> torch.Tensor:
    return torch.randn(ranks, numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bitmap_and_packed(dtype):
    x, numel = gradients(2, 101, 0), 101
    sent = reference.encode_packed(
        x.clone(), torch.zeros(2, numel), torch.ones(2, 1), decay=1.0, rank=0, capacity=60,
        wire_dtype=getattr(torch, dtype), error_feedback=True,
    )  # fmt: skip
    chosen = x[1].abs() > 1
    assert read_bitmap(to_bytes(sent.index_WB[1]), numel).tolist() == chosen.tolist()
    assert not any(to_bytes(sent.index_WB[0]))  # the own row
    expected = torch.where(chosen, x[1].to(getattr(torch, dtype)).float(), 0.0)
    got = read_packed(to_bytes(sent.index_WB[1]), to_bytes(sent.values_WC[1]), dtype, numel)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks(bits):
    x, numel, block = gradients(2, 101, 1), 101, 16
    sent = reference.encode_blocks(x.clone(), torch.zeros(2, numel), decay=1.0, rank=0, bits=bits, block=block)
    codes, scales = to_bytes(sent.codes_WM[1]), to_bytes(sent.scales_WK[1])
    got = read_blocks(codes, scales, bits, block, numel)
    decoded = reference.decode_blocks(sent.codes_WM[1:], sent.scales_WK[1:], torch.zeros(numel), bits=bits, block=block)
    assert got.tolist() == decoded.tolist()
    half_a_step = np.repeat(read_values(scales, "float32"), block)[:numel] / 2
    assert (np.abs(got - x[1].numpy()) <= half_a_step * 1.00001).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sketch(dtype):
    """Lanes that are not one, and a seed as the compressor makes it: spec.seed 5, step 11."""
    numel, ratio, seed = 7 * 6144 * 2, 2.0, 5 * 8 + 11 % 8
    x = gradients(2, numel, 2)
    layout = plan_layout(numel, ratio)
    table = build_hash_table(layout.rows, layout.cells, seed, torch.device("cpu"))
    sent = reference.encode_sketch(
        x.clone(), torch.zeros(2, numel), torch.zeros(2, (numel + 7) // 8, dtype=torch.uint8), torch.full((2, 1), 1.5),
        decay=1.0, rank=0, layout=layout, table=table, wire_dtype=getattr(torch, dtype), error_feedback=True,
    )  # fmt: skip
    union = read_bitmap(to_bytes(sent.index_WB[1]), numel)
    assert union.tolist() == (x[1].abs() > 1.5).tolist()
    found = peel(union, read_values(to_bytes(sent.cells_WS[1]), dtype), 7, ratio, seed)
    assert len(found) == union.sum()
    error = max(abs(value - x[1, i].item()) for i, value in found.items())
    assert error < (1e-4 if dtype == "float32" else 0.3)
