"""Bits, bfloat16 and rounding for compiled loops.

Bits are handled eight at a time: eight flags (bytes of 0 or 1) are one uint64 word, and one byte of a bitmap. This
needs a little-endian machine, as numba's targets are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import overload

from tagc.kernels.cpu.compiled import compiled

_ONES = np.uint64(0x0101010101010101)
_DIAGONAL = np.uint64(0x8040201008040201)  # bit k of byte k
_BELOW_TOP = np.uint64(0x7F7F7F7F7F7F7F7F)
_GATHER = np.uint64(0x0102040810204080)
_7, _56 = np.uint64(7), np.uint64(56)


def intrinsic(function: Any) -> Any:
    """numba's decorator; calls to the result look different from the function's own signature."""
    return numba_intrinsic(function)


@intrinsic
def fused_multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in float32, rounded once, as torch's ``add_(..., alpha=...)`` does."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    assert a == b == c == types.float32
    return types.float32(types.float32, types.float32, types.float32), emit


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of ``array[index]`` (one dimension) that is about to be written."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        view = context.make_array(array)(context, builder, values[0])
        pointer = builder.bitcast(builder.gep(view.data, [values[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, ir.Constant(i32, 1), ir.Constant(i32, 3), ir.Constant(i32, 1)])
        return context.get_dummy_value()

    return types.none(array, types.intp), emit


@intrinsic
def count_bits(typing_context: Any, bits: Any) -> Any:
    """How many bits of an int64 are set."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ctpop(values[0])

    return types.int64(types.int64), emit


@intrinsic
def first_bit(typing_context: Any, bits: Any) -> Any:
    """Number of the lowest set bit of a uint64; 64 if there is none."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), emit


@compiled()
def spread_bits(bits_B: np.ndarray, flags_8B: np.ndarray) -> None:
    """Bitmap bytes to words of eight flags. bits_B: uint8; flags_8B: uint64, as many."""
    for b in range(len(bits_B)):
        flags_8B[b] = ((((np.uint64(bits_B[b]) * _ONES) & _DIAGONAL) + _BELOW_TOP) >> _7) & _ONES


@compiled()
def gather_bits(flags_8B: np.ndarray, bits_B: np.ndarray) -> int:
    """Words of eight flags to bitmap bytes; returns how many are set."""
    count = np.uint64(0)
    for b in range(len(bits_B)):
        word = flags_8B[b]
        bits_B[b] = np.uint8((word * _GATHER) >> _56)
        count += (word * _ONES) >> _56
    return int(np.int64(count))


@compiled()
def count_flags(flags_8B: np.ndarray) -> int:
    """How many flags are set in words of eight."""
    count = np.uint64(0)
    for b in range(len(flags_8B)):
        count += (flags_8B[b] * _ONES) >> _56
    return int(np.int64(count))


@intrinsic
def float_from_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the lower half of an int64."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.trunc(values[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), emit


@intrinsic
def round_to_bfloat16(typing_context: Any, x: Any) -> Any:
    """uint16 bits of the bfloat16 nearest to a float32, ties to even; NaN stays NaN.

    In LLVM terms, since numba widens uint32 arithmetic to 64 bits, which halves the speed of a vectorised loop, and
    since LLVM's own conversion becomes an instruction that flushes denormal numbers to zero.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        i32 = ir.IntType(32)
        bits = builder.bitcast(values[0], i32)
        is_odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(is_odd, i32(0x7FFF))), i32(16))
        is_nan = builder.fcmp_unordered("uno", values[0], values[0])
        return builder.trunc(builder.select(is_nan, i32(0x7FC0), rounded), ir.IntType(16))

    assert x == types.float32
    return types.uint16(types.float32), emit


@intrinsic
def widen_bfloat16(typing_context: Any, bits: Any) -> Any:
    """float32 of a bfloat16's uint16 bits."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        i32 = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(values[0], i32), i32(16)), ir.FloatType())

    assert bits == types.uint16
    return types.float32(types.uint16), emit


def store(array: np.ndarray, i: int | np.uint64, x: np.float32) -> None:
    """``array[i] = x``, rounded where the array is uint16: bfloat16 bits. Compiled code only."""
    raise NotImplementedError


def load(array: np.ndarray, i: int | np.uint64) -> np.float32:
    """``array[i]`` as float32; uint16 means bfloat16 bits. Compiled code only."""
    raise NotImplementedError


@overload(store)
def _store(array, i, x):  # type: ignore[no-untyped-def]
    if array.dtype == types.uint16:

        def store_rounded(array, i, x):  # type: ignore[no-untyped-def]
            array[i] = round_to_bfloat16(x)

        return store_rounded

    def store_whole(array, i, x):  # type: ignore[no-untyped-def]
        array[i] = x

    return store_whole


@overload(load)
def _load(array, i):  # type: ignore[no-untyped-def]
    if array.dtype == types.uint16:
        return lambda array, i: widen_bfloat16(array[i])
    return lambda array, i: array[i]


def round_trip(array: np.ndarray, x: np.float32) -> np.float32:
    """``x`` rounded to what ``array`` stores: bfloat16 where it is uint16. Compiled code only."""
    raise NotImplementedError


@overload(round_trip)
def _round_trip(array, x):  # type: ignore[no-untyped-def]
    if array.dtype == types.uint16:
        return lambda array, x: widen_bfloat16(round_to_bfloat16(x))
    return lambda array, x: x
