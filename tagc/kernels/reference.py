"""The reference backend: the codec itself, in plain PyTorch, on any device."""

from tagc.codec.bitmap import or_bitmaps, pack_bits, unpack_bits
from tagc.codec.peel import peel_sketch
from tagc.codec.sketch import sketch_values
from tagc.codec.sparsify import select_values, threshold_exact, threshold_lognormal, threshold_sampled

__all__ = [
    "or_bitmaps",
    "pack_bits",
    "peel_sketch",
    "select_values",
    "sketch_values",
    "threshold_exact",
    "threshold_lognormal",
    "threshold_sampled",
    "unpack_bits",
]
