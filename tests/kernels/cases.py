"""Sizes, densities and options that every backend is tested at, and inputs made from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from tagc.codec.bitmap import pack_bits
from tagc.codec.hashing import HashTable, SketchLayout, build_hash_table, plan_layout
from tests.codec.common import DENSITIES, make_values

SIZES = (1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2503)  # around BLOCK and powers of two, and a prime
OPTION_SIZE = 523  # a prime: every combination of options runs at this size


@dataclass(frozen=True)
class Case:
    """One call of an encoder."""

    numel: int
    density: float | str = 0.3
    ranks: int = 2
    decay: float = 1.0
    wire_dtype: torch.dtype = torch.bfloat16
    error_feedback: bool = True
    state_dtype: torch.dtype = torch.float32
    lanes: int | None = None  # None: as planned

    def __str__(self) -> str:
        words = (
            self.numel,
            self.density,
            f"W{self.ranks}",
            f"decay{self.decay:g}",
            str(self.wire_dtype)[6:],
            "feedback" if self.error_feedback else "drop",
            "state_" + str(self.state_dtype)[6:],
            f"L{self.lanes or 'auto'}",
        )
        return "-".join(map(str, words))

    @property
    def rank(self) -> int:
        """The rank that encodes: a middle one where there is one."""
        return self.ranks // 2


OPTIONS = {
    "ranks": (1, 2, 3, 4),
    "decay": (0.0, 0.5, 1.0),
    "wire_dtype": (torch.float32, torch.bfloat16),
    "error_feedback": (True, False),
    "state_dtype": (torch.float32, torch.bfloat16),
}
LANES = (None, 7, 31, 127, 251)


def make_cases(sizes: tuple[int, ...] = SIZES, option_size: int = OPTION_SIZE) -> list[Case]:
    """Every size with every density, each under another choice of options, then every combination at one size."""
    combinations = [dict(zip(OPTIONS, values, strict=True)) for values in product(*OPTIONS.values())]
    cases = []
    for number, (numel, density) in enumerate(product(sizes, DENSITIES)):
        options = combinations[number * 37 % len(combinations)]  # 37 and 96 share no factor: no choice comes twice
        cases.append(Case(numel, density, **options, lanes=LANES[number % len(LANES)]))
    cases += [Case(option_size, **options, lanes=LANES[n % len(LANES)]) for n, options in enumerate(combinations)]
    return cases


@dataclass
class Inputs:
    """Arguments for one case; every call gets clones, since encoders write into their inputs."""

    gradient_WN: Tensor
    carry_WN: Tensor
    owed_WB: Tensor
    threshold_W1: Tensor


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Random values at the case's density, an old state with owed and settled values, a threshold per shard."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.stack([make_values(case.numel, case.density, seed + w) for w in range(case.ranks)])
    carry = torch.randn(gradient.shape, generator=generator).to(case.state_dtype)
    owed = torch.rand(gradient.shape, generator=generator) < 0.5
    threshold = torch.rand(case.ranks, 1, generator=generator)
    if case.density in (0.0, "one"):  # nothing may come in through the state
        carry.zero_()
    return Inputs(gradient, carry, pack_bits(owed), threshold)


def make_layout(case: Case, ratio: float = 2.0) -> SketchLayout:
    """The planned layout, or the same number of elements per cell over the case's own number of lanes."""
    layout = plan_layout(case.numel, ratio)
    if case.lanes is None:
        return layout
    rows = -(-case.numel // case.lanes)
    return replace(layout, lanes=case.lanes, rows=rows, cells=max(1, -(-rows // round(3 * ratio))))


def make_table(layout: SketchLayout, device: torch.device, seed: int = 11) -> HashTable:
    """The hash table of a layout."""
    return build_hash_table(layout.rows, layout.cells, seed, device)
