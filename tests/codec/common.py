"""Sizes and densities that every codec operation is tested at, and inputs made from them."""

from __future__ import annotations

import torch

SIZES = (1, 31, 32, 33, 255, 256, 257, 4096, 8191, 24_593)  # around powers of two, and primes
DENSITIES = (0.0, "one", 0.01, 1.0)


def make_values(numel: int, density: float | str, seed: int = 0) -> torch.Tensor:
    """float32 [numel]: zeros but for a random share of normal values ("one": exactly one)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    if density == "one":
        keep = torch.zeros(numel, dtype=torch.bool)
        keep[int(torch.randint(numel, (1,), generator=generator))] = True
    else:
        keep = torch.rand(numel, generator=generator) < density
    return torch.where(keep, values, 0.0)
