"""Numbers of every type that a model's tensors have: read as float32, computed so, and rounded where they are written.

numba knows neither bfloat16 nor, on a CPU, float16, nor any float of 8 bits: their bits travel as integers, whose types
tell them apart.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from kernels.cpu.compiled import compiled, compiled_for_c, inlined, vectorized
from kernels.cpu.native import floats, pointer
from kernels.reference.fp8_rows import FP8

ELEMENTS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
ELEMENTS[FP8] = np.uint8  # of a cache alone
BFLOAT16, FLOAT16, FLOAT8 = types.uint16, types.int16, types.uint8  # as numba sees them
OCTET, SHORT, WORD, HALF, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


@compiled
def elements(address: int, num_rows: int, width: int, element: Any) -> Any:
    """[num_rows, width] of one of ELEMENTS."""
    return carray(pointer(address), (num_rows, width), element)


def _widen(_context: Any, number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if number == BFLOAT16:
            return builder.bitcast(builder.shl(builder.zext(bits, WORD), ir.Constant(WORD, 16)), FLOAT)
        if number == FLOAT8:
            return _widen_octet(builder, bits)
        return builder.fpext(builder.bitcast(bits, HALF), FLOAT) if number == FLOAT16 else bits

    return types.float32(number), generate


def _narrow(_context: Any, number: Any, like: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if like == FLOAT16:
            return builder.bitcast(builder.fptrunc(value, HALF), SHORT)
        if like == FLOAT8:
            return _narrow_to_octet(builder, value)
        if like != BFLOAT16:
            return value
        # To the nearest, ties to even; an infinity that rounding would make of a number's neighbour is one as well.
        bits, sixteen = builder.bitcast(value, WORD), ir.Constant(WORD, 16)
        is_odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(WORD, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, ir.Constant(WORD, 0x7FFF)), is_odd), sixteen)
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.trunc(builder.select(is_nan, ir.Constant(WORD, 0x7FC0), rounded), SHORT)

    return like(types.float32, like), generate


def _widen_octet(builder: Any, octet: Any) -> Any:
    """Its bits as a float16's, whose exponents count from 8 further below, times what these lack.

    As a float32's the smallest would be subnormal, and one such factor costs as much as a hundred others.
    """
    short = builder.zext(octet, SHORT)
    sign = builder.shl(builder.and_(short, ir.Constant(SHORT, 0x80)), ir.Constant(SHORT, 8))
    magnitude = builder.shl(builder.and_(short, ir.Constant(SHORT, 0x7F)), ir.Constant(SHORT, 7))
    number = builder.fpext(builder.bitcast(builder.or_(sign, magnitude), HALF), FLOAT)
    return builder.fmul(number, ir.Constant(FLOAT, 2.0**8))


def _narrow_to_octet(builder: Any, value: Any) -> Any:
    """As kernels.fp8_rows.stored."""

    def word(number: int) -> Any:
        return ir.Constant(WORD, number)

    bits = builder.bitcast(value, WORD)
    magnitude = builder.and_(bits, word(0x7FFFFFFF))
    is_nan, largest = builder.fcmp_unordered("uno", value, value), word(0x43E00000)
    magnitude = builder.select(builder.icmp_signed("<", magnitude, largest), magnitude, largest)
    is_odd = builder.and_(builder.lshr(magnitude, word(20)), word(1))
    normal = builder.add(builder.sub(magnitude, word(0x3C000000)), builder.add(word(0x7FFFF), is_odd))
    beside = builder.fadd(builder.bitcast(magnitude, FLOAT), ir.Constant(FLOAT, 16384.0))
    small = builder.sub(builder.bitcast(beside, WORD), word(0x46800000))
    is_small = builder.icmp_signed("<", magnitude, word(0x3C800000))
    code = builder.select(is_small, small, builder.lshr(normal, word(20)))
    code = builder.select(is_nan, word(0x7F), code)
    sign = builder.and_(builder.lshr(bits, word(24)), word(0x80))
    return builder.trunc(builder.or_(code, sign), OCTET)


widen: Any = intrinsic(_widen)  # an element -> float32
narrow: Any = intrinsic(_narrow)  # (float32, an element of the type that it is to have) -> element


@inlined
def rounded_twice(number: Any, first: Any, factor: Any, second: Any) -> Any:
    """A float32 as an element of the type of `first`, and its product with factor as one of the type of `second`."""
    return narrow(widen(narrow(number, first)) * factor, second)


@vectorized
def write_rows(results: Any, first: Any, column: Any, sums: Any, count: Any, biases: Any) -> None:
    """results[first:, column:] = the first `count` columns of rows of sums, and theirs of biases, if there are any."""
    for row in range(len(sums)):
        own, result = sums[row, :count], results[first + row, column : column + count]
        if len(biases) == 0:
            for index in range(count):
                result[index] = narrow(own[index], result[index])
        else:
            bias = biases[column : column + count]
            for index in range(count):
                result[index] = narrow(own[index] + widen(bias[index]), result[index])


@cache
def rows_writing(element: Any, out_element: Any) -> Any:
    """write_rows as C calls it, at its `address`: elements of biases, and of results.

    Products call it (native.call), so that what takes long to compile is compiled once for all elements.
    """

    def write(
        results: Any,  # to [.., out_features]
        first: int,
        column: int,
        out_features: int,
        bias: int,  # an address, as the next; 0: none
        sums: int,
        rows: int,
        width: int,  # of sums
        columns: int,
    ) -> None:
        own = carray(results, (first + rows, out_features), out_element)
        biases = elements(bias, 1, out_features if bias else 0, element)[0]
        write_rows(own, first, column, floats(sums, rows, width), columns, biases)

    return compiled_for_c(write, (types.voidptr, *[types.int64] * 8))
