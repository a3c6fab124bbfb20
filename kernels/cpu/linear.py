"""y = x W^T + b from panels: a row's bits are its own, whatever number of rows, threads and vector lanes computes it.

BLAS chooses another kernel, and another order of its sums, for another number of rows. Here every output of every row
is one sum over the inputs in their order, in float32 (kernels/cpu/multiply_add.py; of bfloat16, where there is a matrix
unit, kernels/cpu/linear_amx.py). Few rows read a panel once, at the speed of memory; many take turns on parts of it
that a core's own cache holds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu import linear_amx
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.multiply_add import TURN_ROWS, add_products, kind_of
from kernels.cpu.native import floats
from kernels.cpu.panels import LANES, Panels, multiplies_pairs
from kernels.cpu.recording import empty
from kernels.cpu.rows import widened
from kernels.cpu.threads import parts_of

PART_BYTES = 1 << 18  # of a panel, for the turns of many rows: a quarter to an eighth of a core's second cache
PART_WORK = 1 << 17  # products, made in some microseconds; reading a weight takes as long as TURN_ROWS of them

Arguments = arguments_of(
    *("out", "totals", "bias", "x", "panels", "zeros", "room"),  # addresses; bias 0: there is none
    *("num_rows", "row_bytes", "out_features", "num_panels", "panel_bytes", "steps", "part_steps", "row_step_bytes"),
)


@cache
def products(kind: int, num_vectors: int, element: Any, out_element: Any) -> Kernel:
    """Of multiply_add's kind with panels of so many vectors; elements of the bias, and of the results."""
    width = LANES * num_vectors

    def multiply(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_turns = (a.num_rows + TURN_ROWS - 1) // TURN_ROWS
        row_bytes, panel_step = a.row_bytes, a.panel_bytes // a.steps
        for panel in range(a.num_panels * part // num_parts, a.num_panels * (part + 1) // num_parts):
            # The last panel may have more outputs than a row of `out` has room for.
            columns = min(width, a.out_features - panel * width)
            is_whole = columns == width
            part_steps = a.part_steps if is_whole else a.steps
            out_bytes = 4 * (a.out_features if is_whole else width)
            for begin in range(0, a.steps, part_steps):
                steps, w = min(part_steps, a.steps - begin), a.panels + panel * a.panel_bytes + begin * panel_step
                for turn in range(num_turns):
                    first = a.num_rows * turn // num_turns
                    rows = a.num_rows * (turn + 1) // num_turns - first
                    x = a.x + first * row_bytes + begin * a.row_step_bytes
                    target = a.totals + 4 * (first * a.out_features + panel * width)
                    out = target if is_whole else a.room + 4 * thread * TURN_ROWS * width
                    start, start_bytes = (out, out_bytes) if begin else (a.zeros, 0)
                    add_products(kind, num_vectors, rows, out, start, x, w, out_bytes, start_bytes, row_bytes, steps)
                    if not is_whole:
                        done, rest = floats(out, rows, width), floats(target, rows, a.out_features)
                        for row in range(rows):
                            for column in range(columns):
                                rest[row, column] = done[row, column]
            if a.bias or a.out != a.totals:
                totals = floats(a.totals, a.num_rows, a.out_features)
                results = elements(a.out, a.num_rows, a.out_features, out_element)
                biases = elements(a.bias if a.bias else a.zeros, 1, a.out_features, element)[0]
                for row in range(a.num_rows):
                    for column in range(panel * width, panel * width + columns):
                        total = totals[row, column]
                        if a.bias:
                            total += widen(biases[column])
                        results[row, column] = narrow(total, results[row, column])

    return Kernel(multiply, Arguments)


ZEROS = torch.zeros(4 * LANES)  # what sums begin with


def linear(x: Tensor, weight: Panels, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """[num_rows, in_features] x [out_features, in_features] -> [num_rows, out_features], of x's dtype unless told."""
    out_features, in_features = weight.shape
    assert x.dtype == weight.dtype and x.shape[1] == in_features
    assert bias is None or (bias.dtype == weight.dtype and bias.is_contiguous())
    numbers, num_rows, out_dtype = weight.numbers, len(x), out_dtype or x.dtype
    if linear_amx.multiplies_tiles(weight):
        return linear_amx.linear(x, weight, bias, out_dtype)
    rows = x if x.stride(1) == 1 else x.contiguous()
    if x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not multiplies_pairs()):
        rows = widened(rows.contiguous())
    num_panels, steps, width, inputs = numbers.shape
    work = (num_rows + TURN_ROWS) * out_features * in_features
    totals = empty(num_rows, out_features)
    out = totals if out_dtype == torch.float32 else empty(num_rows, out_features, dtype=out_dtype)
    room = empty(0 if out_features % width == 0 else torch.get_num_threads() * TURN_ROWS * width)
    step_bytes, row_bytes = width * inputs * numbers.element_size(), rows.stride(0) * rows.element_size()
    part_steps = steps if num_rows <= TURN_ROWS else max(PART_BYTES // step_bytes, 1)
    multiply = products(kind_of(weight.dtype), width // LANES, ELEMENTS[weight.dtype], ELEMENTS[out_dtype])
    multiply(
        *(out.data_ptr(), totals.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(rows.data_ptr(), numbers.data_ptr(), ZEROS.data_ptr(), room.data_ptr()),
        *(num_rows, row_bytes, out_features, num_panels, steps * step_bytes, steps, part_steps),
        inputs * rows.element_size(),
        parts=parts_of(work, PART_WORK, num_panels),
    )
    return out
