"""Rows of keys and values as a matrix unit takes them: asked for in time, and moved within vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.multiply_add import INT, WORDS, load, number, prefetch
from kernels.cpu.panels import LANES


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


def _transpose(_context: Any, _target: Any, _target_bytes: Any, _words: Any, _offsets: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, target_bytes, words, offsets = arguments
        vectors = []
        for index in range(LANES):
            offset = load(builder, builder.add(offsets, number(8 * index)), INT, 8)
            vectors.append(load(builder, builder.add(words, builder.shl(offset, number(2))), WORDS, 4))
        for distance in (8, 4, 2, 1):
            vectors = _swap(builder, vectors, distance)
        for index, vector in enumerate(vectors):
            place = builder.add(target, builder.mul(target_bytes, number(index)))
            builder.store(vector, builder.inttoptr(place, WORDS.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


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


def _ask_for(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# target[word, row] = words[offsets[row] + word], of LANES words each of LANES rows: addresses of the target, whose rows
# lie target_bytes apart, of words of 32 bits, and of int64 offsets, counted in words.
transpose: Any = intrinsic(_transpose)
interleave: Any = intrinsic(_interleave)  # target[i] = low[i], high[i] for 2 * LANES numbers of 16 bits: addresses
ask_for: Any = intrinsic(_ask_for)  # the line of a cache at an address, which is to be read soon
