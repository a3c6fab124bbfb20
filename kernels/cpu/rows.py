"""Rows of zeros, of a table, side by side, added up, scaled, capped, and in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import tanh
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of

Taking = arguments_of("taken", "table", "rows", "num_rows", "table_rows", "width", "taken_stride", "table_stride")
Adding = arguments_of("sums", "first", "second", "num_rows", "width")
Zeroing = arguments_of("out", "count")  # bytes
Scaling = arguments_of("scaled", "rows", "factor", "num_rows", "width")
Capping = arguments_of("logits", "cap", "num_rows", "width")
Widening = arguments_of("wide", "rows", "num_rows", "width")
PART_NUMBERS = 1 << 14  # moved in some microseconds
CHUNK = 64  # columns that a thread takes at a time of what it computes: vectors end where they do for any threads
WHOLE = {2: np.uint16, 4: np.float32, 8: np.int64}  # numbers of so many bytes that nobody computes with


@cache
def rows_taking(element: Any) -> Kernel:
    def take(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Taking)[0]
        taken = elements(a.taken, a.num_rows, a.taken_stride, element)
        table = elements(a.table, a.table_rows, a.table_stride, element)
        rows = integers(a.rows if a.rows else a.table, a.num_rows)  # without rows: each its own
        for row in range(part, a.num_rows, num_parts):
            own = table[rows[row] if a.rows else row]
            for column in range(a.width):
                taken[row, column] = own[column]

    return Kernel(take, Taking)


@cache
def rows_widening(element: Any) -> Kernel:
    def widen_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Widening)[0]
        wide, rows = floats(a.wide, a.num_rows, a.width), elements(a.rows, a.num_rows, a.width, element)
        for row in range(part, a.num_rows, num_parts):
            for column in range(a.width):
                wide[row, column] = widen(rows[row, column])

    return Kernel(widen_rows, Widening)


@cache
def zeroing() -> Kernel:
    def zero(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Zeroing)[0]
        numbers = carray(pointer(a.out), (a.count,), np.uint8)
        numbers[a.count * part // num_parts : a.count * (part + 1) // num_parts] = np.uint8(0)

    return Kernel(zero, Zeroing)


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    out = empty(*shape, dtype=dtype)
    zeroing()(out.data_ptr(), out.nbytes, parts=parts_of(out.nbytes, 4 * PART_NUMBERS, out.nbytes))
    return out


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """[table_rows, width], [num_rows] int64, each a row of the table -> [num_rows, width]."""
    assert rows.is_contiguous() and rows.dtype == torch.int64
    taken = empty(len(rows), table.shape[1], dtype=table.dtype)
    take_into(taken, table, rows)
    return taken


def beside(*parts: Tensor) -> Tensor:
    """[num_rows, a], [num_rows, b], ... of one dtype -> [num_rows, a + b + ...]."""
    widths = [part.shape[1] for part in parts]
    all_parts = empty(len(parts[0]), sum(widths), dtype=parts[0].dtype)
    for place, part in zip(all_parts.split_with_sizes(widths, dim=1), parts, strict=True):
        take_into(place, part)
    return all_parts


def take_into(taken: Tensor, table: Tensor, rows: Tensor | None = None) -> None:
    """`take_rows` with a place for them, whose rows lie any distance apart; rows None: all of the table's, in order."""
    assert taken.dtype == table.dtype and taken.stride(1) == table.stride(1) == 1
    assert taken.shape[1] == table.shape[1] and (rows is not None or len(taken) == len(table))
    addresses = (taken.data_ptr(), table.data_ptr(), 0 if rows is None else rows.data_ptr())
    take = rows_taking(WHOLE[table.element_size()])
    parts = parts_of(taken.numel(), PART_NUMBERS, len(taken))
    take(*addresses, len(taken), *table.shape, taken.stride(0), table.stride(0), parts=parts)


@cache
def rows_adding(element: Any) -> Kernel:
    def add_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Adding)[0]
        sums, first = elements(a.sums, a.num_rows, a.width, element), elements(a.first, a.num_rows, a.width, element)
        second = elements(a.second, a.num_rows, a.width, element)
        for row in range(part, a.num_rows, num_parts):
            for column in range(a.width):
                sums[row, column] = narrow(widen(first[row, column]) + widen(second[row, column]), first[row, column])

    return Kernel(add_rows, Adding)


def add(first: Tensor, second: Tensor) -> Tensor:
    """Both [num_rows, width], contiguous and of one dtype."""
    assert first.is_contiguous() and second.is_contiguous() and first.dtype == second.dtype
    assert first.shape == second.shape
    sums = empty(*first.shape, dtype=first.dtype)
    parts = parts_of(first.numel(), PART_NUMBERS, len(first))
    rows_adding(ELEMENTS[first.dtype])(sums.data_ptr(), first.data_ptr(), second.data_ptr(), *first.shape, parts=parts)
    return sums


def widened(rows: Tensor) -> Tensor:
    """[num_rows, width] of 16 bits, contiguous -> float32."""
    wide = empty(*rows.shape)
    parts = parts_of(rows.numel(), PART_NUMBERS, len(rows))
    rows_widening(ELEMENTS[rows.dtype])(wide.data_ptr(), rows.data_ptr(), *rows.shape, parts=parts)
    return wide


@cache
def rows_scaling(element: Any) -> Kernel:
    def scale_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Scaling)[0]
        scaled, rows = elements(a.scaled, a.num_rows, a.width, element), elements(a.rows, a.num_rows, a.width, element)
        factor = floats(a.factor, 1, 1)[0, 0]
        for row in range(part, a.num_rows, num_parts):
            for column in range(a.width):
                scaled[row, column] = narrow(widen(rows[row, column]) * factor, rows[row, column])

    return Kernel(scale_rows, Scaling)


def scale(rows: Tensor, factor: Tensor) -> Tensor:
    """[num_rows, width], contiguous, times [] float32, in the dtype of the rows."""
    assert rows.is_contiguous() and factor.dtype == torch.float32 and factor.shape == ()
    scaled = empty(*rows.shape, dtype=rows.dtype)
    parts = parts_of(rows.numel(), PART_NUMBERS, len(rows))
    addresses = (scaled.data_ptr(), rows.data_ptr(), factor.data_ptr())
    rows_scaling(ELEMENTS[rows.dtype])(*addresses, *rows.shape, parts=parts)
    return scaled


@cache
def rows_capping() -> Kernel:
    def cap_rows(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Capping)[0]
        logits, cap = floats(a.logits, a.num_rows, a.width), floats(a.cap, 1, 1)[0, 0]
        chunks = (a.width + CHUNK - 1) // CHUNK
        first = chunks * part // num_parts * CHUNK
        end = min(chunks * (part + 1) // num_parts * CHUNK, a.width)
        for row in range(a.num_rows):
            own = logits[row, first:end]
            for column in range(end - first):
                own[column] = tanh(own[column] / cap) * cap

    return Kernel(cap_rows, Capping)


def cap_in_place(logits: Tensor, cap: Tensor) -> None:
    """kernels/reference/softcap.py of logits [num_rows, width] float32, contiguous; cap: [] float32."""
    assert logits.is_contiguous() and logits.dtype == cap.dtype == torch.float32 and cap.shape == ()
    parts = parts_of(logits.numel(), PART_NUMBERS, -(-logits.shape[1] // CHUNK))
    rows_capping()(logits.data_ptr(), cap.data_ptr(), *logits.shape, parts=parts)
