"""The CPU backend: numba loops on one core, without the interpreter lock. Same contract as the reference.

The first call of each operation compiles for seconds; the result is cached beside the source (``NUMBA_CACHE_DIR`` names
another folder; ``compiled.py`` says what a damaged one costs). Little-endian machines; fused multiply-add in hardware,
else that of the C library, which is slow.

What bounds the speed, at 2.35 M elements a shard, 127 lanes, on a Zen 5 core with 1 MB of its own cache:

- Encode: main memory for the own shard (gradient and state, both read and written). A peer's shard adds its rows to
  cells in the last cache; asking for the next row's cells and the next tile early took 35 % off that shard's time.
- Decode: a sweep takes 7 ns per vector of 16 lanes, from the last cache; 3 sweeps at a load of 0.4, 6 at 0.72. The same
  sweep as a plain loop took 12 times as long. Asking for the next row's cells early did not help: the first sweep has
  enough loads in flight, and in later ones most cells are not needed.
- Packed: memory, and one mispredicted branch per word of 64 bits. Blocks: the division, one per element.
- A state in bfloat16 halves its traffic, but rounding takes back what that gains.
"""

from __future__ import annotations

from tagc.kernels.cpu.delta import apply_delta, encode_delta
from tagc.kernels.cpu.packed import decode_packed, encode_packed
from tagc.kernels.cpu.quantize import decode_blocks, encode_blocks
from tagc.kernels.cpu.sample import sample_values, threshold_exact
from tagc.kernels.cpu.sketch import add_residual, decode_sketch, encode_sketch
from tagc.kernels.reference import threshold_lognormal

__all__ = [
    "add_residual",
    "apply_delta",
    "decode_blocks",
    "decode_packed",
    "decode_sketch",
    "encode_blocks",
    "encode_delta",
    "encode_packed",
    "encode_sketch",
    "sample_values",
    "threshold_exact",
    "threshold_lognormal",
]
