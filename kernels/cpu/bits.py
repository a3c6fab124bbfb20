"""Floating-point numbers as the integers of their bits, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.compiled import compiled


def _reading_as(wanted: Any, given: Any, kind: ir.Type) -> Any:
    """numba's intrinsic that takes `given` and yields the same bits as `wanted`, of LLVM's kind."""

    def read(_context: Any, _number: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], kind)

        return wanted(given), generate

    return intrinsic(read)


bits_of_float: Any = _reading_as(types.int32, types.float32, ir.IntType(32))
float_of_bits: Any = _reading_as(types.float32, types.int32, ir.FloatType())
bits_of_double: Any = _reading_as(types.int64, types.float64, ir.IntType(64))
double_of_bits: Any = _reading_as(types.float64, types.int64, ir.DoubleType())

SIGN, OTHERS = np.int32(31), np.int32(0x7FFFFFFF)


@compiled
def ordered(bits: Any) -> Any:
    """A float32's bits as an integer that is the larger the larger the number is; and back."""
    return np.int32(bits ^ ((bits >> SIGN) & OTHERS))
