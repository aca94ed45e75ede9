"""Private kernel of the sampled threshold. Launched by sample.py."""

from __future__ import annotations

import triton
import triton.language as tl

from tagc.kernels.triton.parts import add_old, widen


@triton.jit
def gather_sample(
    gradient_ptr,
    state_ptr,
    owed_ptr,
    position_ptr,
    x_ptr,
    decay,
    numel,
    index_bytes,
    sample,
    HAS_DECAY: tl.constexpr,
    HAS_OWED: tl.constexpr,
    TILE: tl.constexpr,
):
    """x_WK = gradient + decay * residual at K positions. Grid: (tiles of K, W). Each program writes its own tile only.

    Without HAS_OWED ``owed_ptr`` is not read.
    """
    at, w = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1).to(tl.int64)
    inside = at < sample
    position = tl.load(position_ptr + at, mask=inside, other=0)
    x = tl.load(gradient_ptr + w * numel + position, mask=inside, other=0.0)
    if HAS_DECAY:
        old = widen(tl.load(state_ptr + w * numel + position, mask=inside, other=0.0))
        if HAS_OWED:
            byte = tl.load(owed_ptr + w * index_bytes + (position >> 3), mask=inside, other=0).to(tl.int32)
            old = tl.where(((byte >> (position & 7).to(tl.int32)) & 1) != 0, old, 0.0)
        x = add_old(x, old, decay)
    tl.store(x_ptr + w * sample + at, x, mask=inside)
