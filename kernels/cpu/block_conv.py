"""kernels/reference/block_conv.py in one pass over each row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import NUM_BYTES, floats, integers
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.recurrent_segments import RecurrentSegments

Arguments = arguments_of(
    *("out", "x", "deltas", "base", "first_rows"),  # first_rows 0: rows_each says it
    "room",  # [num_threads, columns of a group] float32
    *("num_rows", "width", "taps", "num_groups", "x_stride", "deltas_stride", "num_segments", "rows_each"),
)
NOTHING = np.float32(0.0)
PART_WORK = 1 << 12  # numbers, each of all taps, computed in some microseconds


@vectorized
def add_tap(sums: Any, x: Any, base: Any, delta: Any) -> None:
    for index in range(len(sums)):
        sums[index] += (widen(base[index]) + delta) * widen(x[index])


@cache
def rows_convolving(element: Any) -> Kernel:
    """Of tensors of these elements."""

    def convolve(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        out, x = elements(a.out, a.num_rows, a.width, element), elements(a.x, a.num_rows, a.x_stride, element)
        deltas, base = (
            elements(a.deltas, a.num_rows, a.deltas_stride, element),
            elements(a.base, a.taps, a.width, element),
        )
        first_rows = integers(a.first_rows if a.first_rows else a.x, a.num_segments)
        size = a.width // a.num_groups
        sums = floats(a.room + NUM_BYTES * size * thread, 1, size)[0]
        for row in range(part, a.num_rows, num_parts):
            if a.first_rows:
                first = 0
                for segment in range(a.num_segments):
                    if first_rows[segment] <= row:
                        first = max(first, first_rows[segment])
                place = row - first
            else:
                place = row % a.rows_each
            taps = min(a.taps, place + 1)
            for group in range(a.num_groups):
                begin, end = group * size, (group + 1) * size
                for index in range(size):
                    sums[index] = NOTHING
                for tap in range(taps):
                    delta = widen(deltas[row, tap * a.num_groups + group])
                    add_tap(sums, x[row - tap, begin:end], base[tap, begin:end], delta)
                to = out[row, begin:end]
                for index in range(size):
                    to[index] = narrow(sums[index], to[index])

    return Kernel(convolve, Arguments)


def block_conv(x: Tensor, deltas: Tensor, base: Tensor, segments: RecurrentSegments) -> Tensor:
    """x: [num_rows, width]; deltas: [num_rows, taps * num_groups], rows may be strided; base: [taps, width]."""
    (num_rows, width), taps, first_rows = x.shape, len(base), segments.first_rows
    assert x.stride(1) == deltas.stride(1) == 1 and base.is_contiguous() and deltas.dtype == base.dtype == x.dtype
    assert base.shape[1] == width and width * taps % deltas.shape[1] == 0
    assert first_rows is None or (first_rows.is_contiguous() and first_rows.dtype == torch.int64)
    out, room = empty(num_rows, width, dtype=x.dtype), empty(torch.get_num_threads(), width * taps // deltas.shape[1])
    rows_convolving(ELEMENTS[x.dtype])(
        *(tensor.data_ptr() for tensor in (out, x, deltas, base)),
        *(0 if first_rows is None else first_rows.data_ptr(), room.data_ptr(), num_rows),
        *(width, taps, deltas.shape[1] // taps, x.stride(0), deltas.stride(0)),
        *(0 if first_rows is None else len(first_rows), segments.num_rows or 0),
        parts=parts_of(num_rows * width, PART_WORK, num_rows),
    )
    return out
