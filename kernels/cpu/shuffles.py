"""Rows of keys and values as products take them: moved within vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.elements import BFLOAT16, FLOAT16, SHORT
from kernels.cpu.panels import LANES
from kernels.cpu.vectors import FLOATS, HALVES, INT, WORDS, load, number

SHORTS = ir.VectorType(SHORT, LANES)


def _swap(builder: Any, vectors: list[Any], distance: int) -> list[Any]:
    """Lanes of two vectors so far apart as they are exchange their squares off the diagonal."""
    swapped = list(vectors)
    for low in (index for index in range(LANES) if not index & distance):
        first, second = vectors[low], vectors[low + distance]
        of_first = [lane + (LANES - distance if lane & distance else 0) for lane in range(LANES)]
        of_second = [lane + (LANES if lane & distance else distance) for lane in range(LANES)]
        for own, lanes in ((low, of_first), (low + distance, of_second)):
            swapped[own] = builder.shuffle_vector(first, second, ir.Constant(WORDS, lanes))
    return swapped


def _widened(builder: Any, words: Any, like: Any) -> list[Any]:
    """The numbers in words, the first of each, then the second, in float32; words of other types as they are."""
    if like not in (BFLOAT16, FLOAT16):
        return [words]
    half = ir.Constant(WORDS, [16] * LANES)
    if like == BFLOAT16:
        high = ir.Constant(WORDS, [0xFFFF0000] * LANES)
        return [builder.bitcast(own, FLOATS) for own in (builder.shl(words, half), builder.and_(words, high))]
    shorts = [builder.trunc(own, SHORTS) for own in (words, builder.lshr(words, half))]
    return [builder.fpext(builder.bitcast(own, HALVES), FLOATS) for own in shorts]


def _transpose(
    _context: Any, target: Any, target_bytes: Any, rows: Any, offsets: Any, offset_bytes: Any, like: Any
) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, target_bytes, rows, offsets, offset_bytes, _ = arguments
        vectors = []
        for index in range(LANES):
            offset = load(builder, builder.add(offsets, number(8 * index)), INT, 8)
            place = builder.add(rows, builder.mul(offset, offset_bytes))
            vectors.append(load(builder, place, WORDS, 2))
        for distance in (8, 4, 2, 1):
            vectors = _swap(builder, vectors, distance)
        widened = [own for vector in vectors for own in _widened(builder, vector, like)]
        for index, vector in enumerate(widened):
            place = builder.add(target, builder.mul(target_bytes, number(index)))
            builder.store(vector, builder.inttoptr(place, vector.type.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, like), generate


def _interleave(_context: Any, _target: Any, _low: Any, _high: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, low, high = arguments
        halves = ir.VectorType(ir.IntType(16), 2 * LANES)
        vectors = [load(builder, address, halves, 2) for address in (low, high)]
        for half in range(2):
            lanes = [index for lane in range(half * LANES, (half + 1) * LANES) for index in (lane, lane + 2 * LANES)]
            pairs = builder.shuffle_vector(*vectors, ir.Constant(ir.VectorType(WORDS.element, 2 * LANES), lanes))
            place = builder.add(target, number(half * 4 * LANES))
            builder.store(pairs, builder.inttoptr(place, halves.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


# target[d, row] = rows[offsets[row] + d], of LANES words of LANES rows each, in float32 if `like` is of 16 bits and as
# they are if not: addresses of the target, whose rows lie target_bytes apart, of the rows, and of their int64 offsets,
# in units of offset_bytes.
transpose: Any = intrinsic(_transpose)
interleave: Any = intrinsic(_interleave)  # target[i] = low[i], high[i] for 2 * LANES numbers of 16 bits: addresses
