"""The inner step of peeling as explicit vectors of 16 lanes.

Written as a loop it is not vectorised: the compiler cannot see that three cell rows, their counters, the flags and the
total lie apart. LLVM turns these vectors into whatever the machine has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from tagc.kernels.cpu.bits import intrinsic

VECTOR = 16  # lanes
_BYTES, _FLOATS = ir.VectorType(ir.IntType(8), VECTOR), ir.VectorType(ir.FloatType(), VECTOR)


class _Memory:
    """Vectors in the memory of a one-dimensional array."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, vector_type: ir.VectorType) -> None:
        self.builder, self.vector_type = builder, vector_type
        self.data = context.make_array(array_type)(context, builder, array).data

    def _pointer(self, index: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(self.data, [index]), self.vector_type.as_pointer())

    def load(self, index: Any) -> Any:
        return self.builder.load(self._pointer(index), align=1)

    def store(self, index: Any, vector: Any) -> None:
        self.builder.store(vector, self._pointer(index), align=1)


def _broadcast(builder: Any, scalar: Any, vector_type: ir.VectorType) -> Any:
    single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.IntType(32)(0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR)
    return builder.shuffle_vector(single, ir.Constant(vector_type, ir.Undefined), mask)


def _constant(vector_type: ir.VectorType, value: float) -> Any:
    return ir.Constant(vector_type, [value] * VECTOR)


@intrinsic
def find_pure(typing_context: Any, flags: Any, at: Any, count: Any, a: Any, b: Any, c: Any) -> Any:
    """Which of 16 elements are unresolved (``flags[at:]``) and alone in a cell: bit per lane, as an integer.

    ``count[a:]``, ``count[b:]`` and ``count[c:]`` are the numbers of unresolved elements in their cells.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        flag_memory = _Memory(context, builder, flags, values[0], _BYTES)
        count_memory = _Memory(context, builder, count, values[2], _BYTES)
        one = _constant(_BYTES, 1)
        a, b, c = (builder.icmp_unsigned("==", count_memory.load(i), one) for i in values[3:])
        is_open = builder.icmp_unsigned("!=", flag_memory.load(values[1]), _constant(_BYTES, 0))
        pure = builder.and_(is_open, builder.or_(builder.or_(a, b), c))
        return builder.zext(builder.bitcast(pure, ir.IntType(VECTOR)), ir.IntType(64))

    return types.int64(flags, types.intp, count, types.intp, types.intp, types.intp), emit


@intrinsic
def take_pure(
    typing_context: Any,
    pure: Any,
    flags: Any,
    at: Any,
    count: Any,
    rest: Any,
    a: Any,
    b: Any,
    c: Any,
    sign_a: Any,
    sign_b: Any,
    sign_c: Any,
    total: Any,
    to: Any,
) -> Any:
    """Resolve the 16 elements in ``pure`` (from :func:`find_pure`).

    The value is what the first pure cell holds (a, then b, then c). It is subtracted from all three cells and added to
    ``total[to:]``; the counts fall by one, and the flags are cleared. Lanes that are not in ``pure`` keep their values.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        flag_memory = _Memory(context, builder, flags, values[1], _BYTES)
        count_memory = _Memory(context, builder, count, values[3], _BYTES)
        rest_memory = _Memory(context, builder, rest, values[4], _FLOATS)
        total_memory = _Memory(context, builder, total, values[11], _FLOATS)
        cells, signs = values[5:8], [_broadcast(builder, sign, _FLOATS) for sign in values[8:11]]
        mask = builder.bitcast(builder.trunc(values[0], ir.IntType(VECTOR)), ir.VectorType(ir.IntType(1), VECTOR))
        one, zero = _constant(_BYTES, 1), _constant(_FLOATS, 0.0)
        counts = [count_memory.load(cell) for cell in cells]
        sums = [rest_memory.load(cell) for cell in cells]
        first, second, third = (builder.fmul(sign, value) for sign, value in zip(signs, sums, strict=True))
        value = builder.select(builder.icmp_unsigned("==", counts[1], one), second, third)
        value = builder.select(builder.icmp_unsigned("==", counts[0], one), first, value)
        value = builder.select(mask, value, zero)
        taken = builder.zext(mask, _BYTES)
        for cell, sign, number, cell_sum in zip(cells, signs, counts, sums, strict=True):
            rest_memory.store(cell, builder.fsub(cell_sum, builder.fmul(sign, value)))
            count_memory.store(cell, builder.sub(number, taken))
        flag_memory.store(values[2], builder.sub(flag_memory.load(values[2]), taken))
        total_memory.store(values[12], builder.fadd(total_memory.load(values[12]), value))
        return context.get_dummy_value()

    places = (types.intp, types.intp, types.intp)
    floats = (types.float32, types.float32, types.float32)
    signature = types.none(types.int64, flags, types.intp, count, rest, *places, *floats, total, types.intp)
    return signature, emit
