"""y = x W^T + b from panels of bfloat16 by a CPU's matrix unit (kernels/cpu/amx.py), to be read beside linear.py.

16 rows at a time: up to so many take as long as one does, which is what reading the weights takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.amx import INPUTS, ROWS, configure, has_amx, multiply_tiles, release
from kernels.cpu.elements import ELEMENTS, rows_writing
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import call
from kernels.cpu.panels import LANES, Panels
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of

AHEAD = 8192  # bytes of a panel that are asked for before they are read
PART_WORK = 1 << 17  # products of ROWS rows, which take as long as to read a weight

Arguments = arguments_of(
    *("out", "bias", "x", "panels", "room"),  # addresses; bias 0: there is none
    *("num_rows", "row_bytes", "out_features", "num_panels", "panel_bytes", "steps"),
    "write",  # the address of elements.rows_writing
)


def multiplies_tiles(weight: Panels) -> bool:
    return weight.numbers.dtype == torch.bfloat16 and weight.shape[1] % INPUTS == 0 and has_amx()


@cache
def products(num_vectors: int) -> Kernel:
    """Of panels of so many vectors."""
    width = LANES * num_vectors

    def multiply(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_turns, configured = (a.num_rows + ROWS - 1) // ROWS, 0
        sums = a.room + 4 * thread * ROWS * width
        for panel in range(a.num_panels * part // num_parts, a.num_panels * (part + 1) // num_parts):
            # The last panel may have more outputs than a row of `out` has room for.
            column, columns = panel * width, min(width, a.out_features - panel * width)
            for turn in range(num_turns):
                first = a.num_rows * turn // num_turns
                rows = a.num_rows * (turn + 1) // num_turns - first
                if rows != configured:
                    configure(rows)
                    configured = rows
                x, weights = a.x + first * a.row_bytes, a.panels + panel * a.panel_bytes
                multiply_tiles(0, AHEAD, num_vectors, sums, x, weights, a.row_bytes, a.steps)
                call(a.write, a.out, (first, column, a.out_features, a.bias, sums, rows, width, columns))
        release()

    return Kernel(multiply, Arguments)


def linear(x: Tensor, weight: Panels, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """[num_rows, in_features] x [out_features, in_features] -> [num_rows, out_features] where `multiplies_tiles`."""
    out_features, in_features = weight.shape
    num_rows = len(x)
    rows, room = x if x.stride(1) == 1 else x.contiguous(), room_of(weight)
    out = empty(num_rows, out_features, dtype=out_dtype)
    work = (num_rows + ROWS) * out_features * in_features // ROWS
    arguments = arguments_for(rows, weight, bias, out, room)
    kernel_of(weight)(*arguments, parts=parts_of(work, PART_WORK, len(weight.numbers)))
    return out


def room_of(weight: Panels) -> Tensor:
    """For sums on their way, of all threads."""
    return empty(torch.get_num_threads() * ROWS * weight.width)


def kernel_of(weight: Panels) -> Kernel:
    return products(weight.width // LANES)


def arguments_for(rows: Tensor, weight: Panels, bias: Tensor | None, out: Tensor, room: Tensor) -> tuple[int, ...]:
    """What the kernel takes that computes `out` of rows whose numbers lie side by side."""
    (out_features, in_features), numbers = weight.shape, weight.numbers
    return (
        *(out.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(rows.data_ptr(), numbers.data_ptr(), room.data_ptr()),
        *(len(rows), rows.stride(0) * rows.element_size(), out_features, len(numbers)),
        *(in_features * weight.width * numbers.element_size(), in_features // INPUTS),
        rows_writing(ELEMENTS[weight.dtype], ELEMENTS[out.dtype]).address,
    )
