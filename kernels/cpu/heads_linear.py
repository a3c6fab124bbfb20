"""Products of heads by kernels/cpu/experts_linear.py: rows are put in the order of their heads, and back."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.elements import elements
from kernels.cpu.experts_linear import PanelsOfExperts, linear_of_sorted
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers
from kernels.cpu.recording import empty
from kernels.cpu.rows import PART_NUMBERS, WHOLE
from kernels.cpu.threads import parts_of

Arguments = arguments_of(
    *("out", "x"),  # addresses: [num_second, num_first, width] and [num_first, num_second, width]
    "starts",  # [num_second + 1] int64, or 0
    *("num_first", "num_second", "width"),
    *("out_first", "out_second", "x_first", "x_second"),  # from one to the next, in numbers
)


@cache
def rows_swapping(element: Any) -> Kernel:
    """What a number is, of those that nobody computes with."""

    def swap(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        out = elements(a.out, 1, (a.num_second - 1) * a.out_second + (a.num_first - 1) * a.out_first + a.width, element)
        x = elements(a.x, 1, (a.num_first - 1) * a.x_first + (a.num_second - 1) * a.x_second + a.width, element)
        for row in range(part, a.num_first * a.num_second, num_parts):
            first, second = row // a.num_second, row % a.num_second
            target, source = first * a.out_first + second * a.out_second, first * a.x_first + second * a.x_second
            for column in range(a.width):
                out[0, target + column] = x[0, source + column]
        if a.starts and part == 0:
            starts = integers(a.starts, a.num_second + 1)
            for second in range(a.num_second + 1):
                starts[second] = second * a.num_first

    return Kernel(swap, Arguments)


def _swap(out: Tensor, x: Tensor, starts: Tensor | None = None) -> None:
    """x [a, b, width] into out [b, a, width]; starts [b + 1]: where each of the b begins among the rows of out."""
    num_first, num_second, width = x.shape
    assert out.shape == (num_second, num_first, width) and out.dtype == x.dtype and x.stride(2) == out.stride(2) == 1
    rows_swapping(WHOLE[x.element_size()])(
        out.data_ptr(),
        x.data_ptr(),
        0 if starts is None else starts.data_ptr(),
        *x.shape,
        out.stride(1),
        out.stride(0),
        x.stride(0),
        x.stride(1),
        parts=parts_of(x.numel(), PART_NUMBERS, num_first * num_second),
    )


def linear_of_heads(x: Tensor, weights: PanelsOfExperts, out: Tensor) -> None:
    """[num_rows, num_heads, in_features], and of each head [out_features, in_features].

    out: [num_rows, num_heads, out_features], written; of x and out rows and heads may lie further apart.
    """
    num_rows, num_heads, in_features = x.shape
    assert len(weights) == num_heads
    if num_rows == 0:
        return
    by_head, starts = empty(num_heads * num_rows, in_features, dtype=x.dtype), empty(num_heads + 1, dtype=torch.int64)
    _swap(by_head.view(num_heads, num_rows, in_features), x, starts)
    products = linear_of_sorted(by_head, weights, starts, most_rows=num_rows)
    _swap(out, products.view(num_heads, num_rows, -1))
