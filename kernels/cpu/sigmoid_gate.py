"""kernels/reference/sigmoid_gate.py in one pass over each row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of

ONE = np.float32(1.0)
PART_WORK = 1 << 12  # numbers, gated in some microseconds
Arguments = arguments_of("out", "x", "gate", "num_rows", "width", "x_stride", "gate_stride", "is_one")


@cache
def rows_gate(element: Any) -> Kernel:
    """Of tensors of these elements."""

    def gate_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        to, rows = elements(a.out, a.num_rows, a.width, element), elements(a.x, a.num_rows, a.x_stride, element)
        gates = elements(a.gate, a.num_rows, a.gate_stride, element)
        for row in range(part, a.num_rows, num_parts):
            out, x, gate = to[row], rows[row], gates[row]
            if a.is_one:
                scale = ONE / (ONE + exp2(-widen(gate[0]) * LOG2_E))
                for column in range(a.width):
                    out[column] = narrow(widen(x[column]) * scale, x[column])
            else:
                for column in range(a.width):
                    scale = ONE / (ONE + exp2(-widen(gate[column]) * LOG2_E))
                    out[column] = narrow(widen(x[column]) * scale, x[column])

    return Kernel(gate_rows, Arguments)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x: [num_rows, width]; gate: the same, or [num_rows, 1]; rows may be strided."""
    num_rows, width = x.shape
    assert gate.shape in ((num_rows, width), (num_rows, 1)) and gate.dtype == x.dtype
    assert x.stride(1) == 1 and (gate.shape[1] == 1 or gate.stride(1) == 1)
    out = empty(num_rows, width, dtype=x.dtype)
    parts = parts_of(num_rows * width, PART_WORK, num_rows)
    strides, is_one = (x.stride(0), gate.stride(0)), gate.shape[1] == 1
    kernel = rows_gate(ELEMENTS[x.dtype])
    kernel(out.data_ptr(), x.data_ptr(), gate.data_ptr(), num_rows, width, *strides, is_one, parts=parts)
    return out
