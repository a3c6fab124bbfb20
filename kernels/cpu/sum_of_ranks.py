"""kernels/reference/sum_of_ranks.py in one pass over the numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import exact
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of

PART_NUMBERS = 1 << 13  # added up in some microseconds
Arguments = arguments_of("sums", "parts", "num_ranks", "count")


@exact
def add_in_order(sums: Any, of_ranks: Any, first: Any, end: Any) -> None:
    if len(of_ranks) == 2:  # in vector lanes
        own, one, other = sums[first:end], of_ranks[0, first:end], of_ranks[1, first:end]
        for index in range(end - first):
            own[index] = narrow(widen(one[index]) + widen(other[index]), one[index])
    else:
        for index in range(first, end):
            total = widen(of_ranks[0, index])
            for rank in range(1, len(of_ranks)):
                total = total + widen(of_ranks[rank, index])
            sums[index] = narrow(total, of_ranks[0, index])


@cache
def ranks_adding(element: Any) -> Kernel:
    """Of tensors of these elements."""

    def add_ranks(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        sums, of_ranks = elements(a.sums, 1, a.count, element)[0], elements(a.parts, a.num_ranks, a.count, element)
        add_in_order(sums, of_ranks, a.count * part // num_parts, a.count * (part + 1) // num_parts)

    return Kernel(add_ranks, Arguments)


def sum_of_ranks(parts: Tensor) -> Tensor:
    """[num_ranks, num_rows, width], contiguous -> [num_rows, width]."""
    assert parts.is_contiguous()
    num_ranks, num_rows, width = parts.shape
    sums, count = empty(num_rows, width, dtype=parts.dtype), num_rows * width
    add = ranks_adding(ELEMENTS[parts.dtype])
    add(sums.data_ptr(), parts.data_ptr(), num_ranks, count, parts=parts_of(count, PART_NUMBERS, max(count, 1)))
    return sums
