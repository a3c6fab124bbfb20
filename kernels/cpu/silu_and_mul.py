"""kernels/reference/silu_and_mul.py in one pass over each row."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kernels.cpu.exp2 import LOG2_E, exp2
from kernels.cpu.native import NativeKernel, floats

ONE = np.float32(1.0)


def gate_rows(gated: int, gate_up: int, num_rows: int, width: int) -> None:
    """Addresses of float32."""
    to, rows = floats(gated, num_rows, width), floats(gate_up, num_rows, 2 * width)
    for row in range(num_rows):
        for column in range(width):
            gate = rows[row, column]
            to[row, column] = gate / (ONE + exp2(-gate * LOG2_E)) * rows[row, width + column]


_gate_rows = NativeKernel(gate_rows)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[num_rows, 2 * intermediate] float32, gate first -> [num_rows, intermediate]."""
    gate_up, num_rows, width = gate_up.contiguous(), len(gate_up), gate_up.shape[1] // 2
    gated = gate_up.new_empty(num_rows, width)
    _gate_rows(gated.data_ptr(), gate_up.data_ptr(), num_rows, width)
    return gated
