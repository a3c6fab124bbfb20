"""kernels/reference/silu_and_mul.py in one pass over each row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2
from kernels.cpu.native import NativeKernel

ONE = np.float32(1.0)


@cache
def rows_gate(element: Any) -> NativeKernel:
    """Of tensors of these elements."""

    def gate_rows(gated: int, gate_up: int, num_rows: int, width: int) -> None:
        to, rows = elements(gated, num_rows, width, element), elements(gate_up, num_rows, 2 * width, element)
        for row in range(num_rows):
            for column in range(width):
                gate, up = widen(rows[row, column]), widen(rows[row, width + column])
                to[row, column] = narrow(gate / (ONE + exp2(-gate * LOG2_E)) * up, rows[row, column])

    return NativeKernel(gate_rows)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[num_rows, 2 * intermediate], gate first -> [num_rows, intermediate]."""
    gate_up, num_rows, width = gate_up.contiguous(), len(gate_up), gate_up.shape[1] // 2
    gated = gate_up.new_empty(num_rows, width)
    rows_gate(ELEMENTS[gate_up.dtype])(gated.data_ptr(), gate_up.data_ptr(), num_rows, width)
    return gated
