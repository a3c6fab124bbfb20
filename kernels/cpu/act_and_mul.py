"""kernels/reference/act_and_mul.py in one pass over each row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.bits import float_of_bits
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2, gelu_power
from kernels.cpu.kernel import Kernel, arguments_of, bits_of
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference import act_and_mul as reference
from kernels.reference.act_and_mul import Activation, ActivationName, name_and_limit

ONE = np.float32(1.0)
ALPHA, LIMIT = np.float32(reference.ALPHA), np.float32(reference.LIMIT)  # of clamped_swiglu
CHUNK = 64  # columns that a thread takes at a time
PART_WORK = 1 << 12  # numbers, gated in some microseconds
# The last: the bits of a float32, where there is one.
Arguments = arguments_of("gated", "gate_up", "num_rows", "width", "limit")


@cache
def rows_gate(element: Any, activation: ActivationName, is_limited: bool) -> Kernel:
    """Of tensors of these elements."""
    is_gelu, is_clamped = activation == "gelu_tanh", activation == "clamped_swiglu"

    def gate_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_rows, width = a.num_rows, a.width
        to, rows = elements(a.gated, num_rows, width, element), elements(a.gate_up, num_rows, 2 * width, element)
        chunks = (width + CHUNK - 1) // CHUNK
        first = min(chunks * part // num_parts * CHUNK, width)
        end = min(chunks * (part + 1) // num_parts * CHUNK, width)
        limit = float_of_bits(np.int32(a.limit))
        for row in range(num_rows):
            out, gates, ups = to[row, first:end], rows[row, first:end], rows[row, width + first : width + end]
            for column in range(end - first):
                gate, up = widen(gates[column]), widen(ups[column])
                if is_clamped:
                    gate, up = min(gate, LIMIT), min(max(up, -LIMIT), LIMIT) + ONE
                    power = ALPHA * gate
                else:
                    power = gelu_power(gate) if is_gelu else gate
                gated = gate / (ONE + exp2(-power * LOG2_E))
                if is_limited:
                    gated, up = min(gated, limit), min(max(up, -limit), limit)
                out[column] = narrow(gated * up, gates[column])

    return Kernel(gate_rows, Arguments)


def act_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """[num_rows, 2 * intermediate], gate first -> [num_rows, intermediate]."""
    gate_up, num_rows, width = gate_up.contiguous(), len(gate_up), gate_up.shape[1] // 2
    gated = empty(num_rows, width, dtype=gate_up.dtype)
    parts = parts_of(num_rows * width, PART_WORK, -(-width // CHUNK))
    name, limit = name_and_limit(activation)
    gate = rows_gate(ELEMENTS[gate_up.dtype], name, limit is not None)
    gate(gated.data_ptr(), gate_up.data_ptr(), num_rows, width, bits_of(limit or 0.0), parts=parts)
    return gated
