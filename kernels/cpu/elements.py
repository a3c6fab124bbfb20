"""Numbers of every type that a model's tensors have: read as float32, computed so, and rounded where they are written.

numba knows neither bfloat16 nor, on a CPU, float16: their bits travel as integers, whose types tell them apart.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from kernels.cpu.compiled import compiled, compiled_for_c, vectorized
from kernels.cpu.native import floats, pointer

ELEMENTS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}
BFLOAT16, FLOAT16 = types.uint16, types.int16  # as numba sees them
SHORT, WORD, HALF, FLOAT = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


@compiled
def elements(address: int, num_rows: int, width: int, element: Any) -> Any:
    """[num_rows, width] of one of ELEMENTS."""
    return carray(pointer(address), (num_rows, width), element)


def _widen(_context: Any, number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if number == BFLOAT16:
            return builder.bitcast(builder.shl(builder.zext(bits, WORD), ir.Constant(WORD, 16)), FLOAT)
        return builder.fpext(builder.bitcast(bits, HALF), FLOAT) if number == FLOAT16 else bits

    return types.float32(number), generate


def _narrow(_context: Any, number: Any, like: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if like == FLOAT16:
            return builder.bitcast(builder.fptrunc(value, HALF), SHORT)
        if like != BFLOAT16:
            return value
        # To the nearest, ties to even; an infinity that rounding would make of a number's neighbour is one as well.
        bits, sixteen = builder.bitcast(value, WORD), ir.Constant(WORD, 16)
        is_odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(WORD, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, ir.Constant(WORD, 0x7FFF)), is_odd), sixteen)
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.trunc(builder.select(is_nan, ir.Constant(WORD, 0x7FC0), rounded), SHORT)

    return like(types.float32, like), generate


widen: Any = intrinsic(_widen)  # an element -> float32
narrow: Any = intrinsic(_narrow)  # (float32, an element of the type that it is to have) -> element


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
