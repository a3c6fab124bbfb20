"""kernels/reference/gate.py in one pass over each row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2, gelu_power
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.recording import empty
from kernels.cpu.softplus import softplus
from kernels.cpu.threads import parts_of
from kernels.reference.gate import GateFunction

NOTHING, ONE = np.float32(0.0), np.float32(1.0)
PART_WORK = 1 << 12  # numbers, gated in some microseconds
Arguments = arguments_of("out", "x", "by", "num_rows", "width", "x_stride", "by_stride", "num_gates")


@vectorized
def sigmoid(x: Any) -> Any:
    return ONE / (ONE + exp2(-x * LOG2_E))


@vectorized
def gelu_tanh(x: Any) -> Any:
    return x / (ONE + exp2(-gelu_power(x) * LOG2_E))


@vectorized
def relu(x: Any) -> Any:
    return max(x, NOTHING)


@vectorized
def identity(x: Any) -> Any:
    return x


FUNCTIONS: Mapping[GateFunction, Any] = {
    "sigmoid": sigmoid,
    "softplus": softplus,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "identity": identity,
}


@cache
def rows_gate(element: Any, factor_element: Any, function: GateFunction) -> Kernel:
    """Of tensors of these elements."""
    factor = FUNCTIONS[function]

    def gate_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        to, rows = elements(a.out, a.num_rows, a.width, element), elements(a.x, a.num_rows, a.x_stride, element)
        gates = elements(a.by, a.num_rows, a.by_stride, factor_element)
        for row in range(part, a.num_rows, num_parts):
            out, x, by = to[row], rows[row], gates[row]
            if a.num_gates == a.width:
                for column in range(a.width):
                    out[column] = narrow(widen(x[column]) * factor(widen(by[column])), x[column])
            else:
                num_columns = a.width // a.num_gates
                for own in range(a.num_gates):
                    scale = factor(widen(by[own]))
                    scaled, own_x = out[own * num_columns :], x[own * num_columns :]
                    for column in range(num_columns):
                        scaled[column] = narrow(widen(own_x[column]) * scale, own_x[column])

    return Kernel(gate_rows, Arguments)


def gate(x: Tensor, by: Tensor, function: GateFunction) -> Tensor:
    """x: [num_rows, width]; by: [num_rows, gates], of x's dtype or float32; rows may be strided."""
    num_rows, width = x.shape
    assert len(by) == num_rows and width % by.shape[1] == 0 and by.dtype in (x.dtype, torch.float32)
    assert x.stride(1) == 1 and (by.shape[1] == 1 or by.stride(1) == 1)
    out = empty(num_rows, width, dtype=x.dtype)
    parts = parts_of(num_rows * width, PART_WORK, num_rows)
    strides, num_gates = (x.stride(0), by.stride(0)), by.shape[1]
    kernel = rows_gate(ELEMENTS[x.dtype], ELEMENTS[by.dtype], function)
    kernel(out.data_ptr(), x.data_ptr(), by.data_ptr(), num_rows, width, *strides, num_gates, parts=parts)
    return out
