"""The ``triton`` backend: the contract of :mod:`tagc.kernels.reference` on a GPU, without a wait for the device.

Launchers (sketch, peel, packed, quantize, delta, sample) implement the contract; the kernels beside them are private.
Everything is in gather form: each program writes its own part of the output, there are no atomics, and steps that need
each other's results are launches of their own; so results do not depend on the order in which programs run. With
``TRITON_INTERPRET=1`` set before triton is first imported, the same kernels run on CPU tensors, for tests.
"""

from tagc.kernels.reference import threshold_exact, threshold_lognormal
from tagc.kernels.triton.delta import apply_delta, encode_delta
from tagc.kernels.triton.launch import explain_unusable
from tagc.kernels.triton.packed import decode_packed, encode_packed
from tagc.kernels.triton.peel import decode_sketch
from tagc.kernels.triton.quantize import decode_blocks, encode_blocks
from tagc.kernels.triton.sample import sample_values
from tagc.kernels.triton.sketch import add_residual, encode_sketch

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
    "explain_unusable",
    "sample_values",
    "threshold_exact",
    "threshold_lognormal",
]
