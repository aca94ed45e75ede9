"""Sizes, densities and options that every backend is tested at, and inputs made from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from torch import Tensor

from tagc.codec.bitmap import pack_bits
from tagc.codec.hashing import HashTable, SketchLayout, build_hash_table, plan_layout
from tests.codec.common import DENSITIES, make_values

SIZES = (1, 31, 32, 33, 255, 257, 1024, 2503)  # around a word and BLOCK, a power of two, and a prime
OPTION_SIZE = 523  # a prime: the covering combinations of options run at this size
SEED = 11  # of every hash table


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


TIMED = Case(2503, 0.2)  # the settings that experiments/kernels/bench.py times, in small

OPTIONS = {
    "ranks": (1, 2, 3, 4),
    "decay": (0.0, 0.5, 1.0),
    "wire_dtype": (torch.float32, torch.bfloat16),
    "error_feedback": (True, False),
    "state_dtype": (torch.float32, torch.bfloat16),
    "lanes": (None, 7, 31, 251),
}


def list_pairs(values: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
    """Every two choices of a combination, with the places of the options they belong to."""
    return {(i, values[i], j, values[j]) for i, j in combinations(range(len(values)), 2)}


def cover_pairs() -> list[tuple[object, ...]]:
    """Combinations of OPTIONS in which every two choices of two options occur together, found greedily.

    An error that takes one or two options to show is found as by the full product of 384 combinations.
    """
    every = list(product(*OPTIONS.values()))
    missing = set().union(*(list_pairs(values) for values in every))
    chosen = []
    while missing:
        best = max(every, key=lambda values: len(list_pairs(values) & missing))  # the first of equals
        chosen.append(best)
        missing -= list_pairs(best)
    return chosen


def make_cases() -> list[Case]:
    """Every size with every density, the options in turn, then every covering combination at one size."""
    options = [dict(zip(OPTIONS, values, strict=True)) for values in cover_pairs()]
    cases = [
        Case(numel, density, **options[number % len(options)])
        for number, (numel, density) in enumerate(product(SIZES, DENSITIES))
    ]
    return [*cases, *(Case(OPTION_SIZE, **each) for each in options), TIMED]


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


def make_table(layout: SketchLayout, device: torch.device, seed: int = SEED) -> HashTable:
    """The hash table of a layout."""
    return build_hash_table(layout.rows, layout.cells, seed, device)
