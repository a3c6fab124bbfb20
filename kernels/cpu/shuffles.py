"""Rows of keys and values as products take them: moved within vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.elements import BFLOAT16, FLOAT16, SHORT
from kernels.cpu.native import call_llvm
from kernels.cpu.panels import LANES, has_feature
from kernels.cpu.vectors import BYTE, FLOAT, FLOATS, HALF, HALF_WORDS, HALVES, INT, WORD, WORDS, load, number

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


def _expand(_context: Any, _target: Any, _source: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source, _ = arguments
        shorts = builder.zext(load(builder, source, ir.VectorType(BYTE, 2 * LANES), 1), HALF_WORDS)
        signs = builder.shl(builder.and_(shorts, _every_short(0x80)), _every_short(8))
        magnitudes = builder.and_(shorts, _every_short(0x7F))
        if like == BFLOAT16 and has_feature("avx512bw"):
            numbers = builder.or_(signs, _as_bfloat16(builder, magnitudes))
        else:
            # As kernels.cpu.elements.widen has them.
            halves = builder.or_(signs, builder.shl(magnitudes, _every_short(7)))
            floats = builder.fpext(builder.bitcast(halves, _twice(HALF)), _twice(FLOAT))
            numbers = builder.fmul(floats, ir.Constant(_twice(FLOAT), [2.0**8] * (2 * LANES)))
            if like == BFLOAT16:  # which has bits for all that such numbers have
                words = builder.lshr(
                    builder.bitcast(numbers, _twice(WORD)), ir.Constant(_twice(WORD), [16] * 2 * LANES)
                )
                numbers = builder.trunc(words, HALF_WORDS)
            elif like == FLOAT16:
                numbers = builder.fptrunc(numbers, _twice(HALF))
        builder.store(numbers, builder.inttoptr(target, numbers.type.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), generate


def _as_bfloat16(builder: Any, magnitudes: Any) -> Any:
    """Exponents count from 120 further below; the smallest numbers, which have none of their own, are looked up."""
    normal = builder.add(builder.shl(magnitudes, _every_short(4)), _every_short(120 << 7))
    table = [0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60] * (LANES // 4)  # 0 to 7 times 2**-9
    smallest = call_llvm(
        builder, "llvm.x86.avx512.permvar.hi.512", HALF_WORDS, [ir.Constant(HALF_WORDS, table), magnitudes]
    )
    return builder.select(builder.icmp_unsigned("<", magnitudes, _every_short(8)), smallest, normal)


def _every_short(value: int) -> Any:
    return ir.Constant(HALF_WORDS, [value] * (2 * LANES))


def _twice(kind: Any) -> Any:
    return ir.VectorType(kind, 2 * LANES)


# target[i] = source[i] for 2 * LANES numbers of 8 bits, as numbers of the type of `like`: addresses.
expand_lanes: Any = intrinsic(_expand)
# target[d, row] = rows[offsets[row] + d], of LANES words of LANES rows each, in float32 if `like` is of 16 bits and as
# they are if not: addresses of the target, whose rows lie target_bytes apart, of the rows, and of their int64 offsets,
# in units of offset_bytes.
transpose: Any = intrinsic(_transpose)
interleave: Any = intrinsic(_interleave)  # target[i] = low[i], high[i] for 2 * LANES numbers of 16 bits: addresses
