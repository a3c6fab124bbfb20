"""Rows of zeros, of a table, and in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.elements import ELEMENTS, elements, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.recording import empty
from kernels.cpu.threads import num_threads, thread_num

Taking = arguments_of("taken", "table", "rows", "num_rows", "table_rows", "width")
Zeroing = arguments_of("out", "count")  # bytes
Widening = arguments_of("wide", "rows", "num_rows", "width")
WHOLE = {2: np.uint16, 4: np.float32, 8: np.int64}  # numbers of so many bytes that nobody computes with


@cache
def rows_taking(element: Any) -> Kernel:
    def take(arguments: Any) -> None:
        a = carray(arguments, 1, Taking)[0]
        taken = elements(a.taken, a.num_rows, a.width, element)
        table = elements(a.table, a.table_rows, a.width, element)
        rows = integers(a.rows, a.num_rows)
        for row in range(np.int64(thread_num()), a.num_rows, np.int64(num_threads())):
            for column in range(a.width):
                taken[row, column] = table[rows[row], column]

    return Kernel(take, Taking)


@cache
def rows_widening(element: Any) -> Kernel:
    def widen_rows(arguments: Any) -> None:
        a = carray(arguments, 1, Widening)[0]
        wide, rows = floats(a.wide, a.num_rows, a.width), elements(a.rows, a.num_rows, a.width, element)
        for row in range(np.int64(thread_num()), a.num_rows, np.int64(num_threads())):
            for column in range(a.width):
                wide[row, column] = widen(rows[row, column])

    return Kernel(widen_rows, Widening)


@cache
def zeroing() -> Kernel:
    def zero(arguments: Any) -> None:
        a = carray(arguments, 1, Zeroing)[0]
        numbers = carray(pointer(a.out), (a.count,), np.uint8)
        for place in range(a.count * thread_num() // num_threads(), a.count * (thread_num() + 1) // num_threads()):
            numbers[place] = np.uint8(0)

    return Kernel(zero, Zeroing)


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    out = empty(*shape, dtype=dtype)
    zeroing()(out.data_ptr(), out.nbytes)
    return out


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """[table_rows, width], [num_rows] int64, each a row of the table -> [num_rows, width]."""
    assert table.is_contiguous() and rows.is_contiguous() and rows.dtype == torch.int64
    taken = empty(len(rows), table.shape[1], dtype=table.dtype)
    take = rows_taking(WHOLE[table.element_size()])
    take(taken.data_ptr(), table.data_ptr(), rows.data_ptr(), len(rows), *table.shape)
    return taken


def widened(rows: Tensor) -> Tensor:
    """[num_rows, width] of 16 bits, contiguous -> float32."""
    wide = empty(*rows.shape)
    rows_widening(ELEMENTS[rows.dtype])(wide.data_ptr(), rows.data_ptr(), *rows.shape)
    return wide
