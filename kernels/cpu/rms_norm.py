"""kernels/reference/rms_norm.py in one pass over each row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.native import NativeKernel, floats

NOTHING, ONE = np.float32(0.0), np.float32(1.0)


@cache
def rows_norm(element: Any) -> NativeKernel:
    """Of tensors of these elements."""

    def norm_rows(
        normed: int, total: int, x: int, residual: int, weight: int, eps: int, num_rows: int, width: int
    ) -> None:
        """Addresses; residual 0: there is none, and total is x."""
        to, rows = elements(normed, num_rows, width, element), elements(x, num_rows, width, element)
        sums, scales = elements(total, num_rows, width, element), elements(weight, 1, width, element)[0]
        added = elements(residual if residual else x, num_rows, width, element)
        for row in range(num_rows):
            squares = NOTHING
            if residual:
                for column in range(width):
                    sums[row, column] = narrow(widen(rows[row, column]) + widen(added[row, column]), rows[row, column])
            for column in range(width):
                number = widen(sums[row, column])
                squares += number * number
            scale = ONE / np.sqrt(squares / np.float32(width) + floats(eps, 1, 1)[0, 0])
            for column in range(width):
                number = widen(sums[row, column]) * scale * widen(scales[column])
                to[row, column] = narrow(number, rows[row, column])

    return NativeKernel(norm_rows)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x: [num_rows, hidden], weight: [hidden] of one dtype, eps: [] float32 -> [num_rows, hidden]."""
    x = x.contiguous()
    assert x.dtype == weight.dtype and eps.dtype == torch.float32 and weight.shape == x.shape[1:]
    normed, rows, (num_rows, width) = torch.empty_like(x), x.data_ptr(), x.shape
    norm = rows_norm(ELEMENTS[x.dtype])
    norm(normed.data_ptr(), rows, rows, 0, weight.data_ptr(), eps.data_ptr(), num_rows, width)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), all [num_rows, hidden] of one dtype."""
    x, residual, (num_rows, width) = x.contiguous(), residual.contiguous(), x.shape
    assert x.dtype == residual.dtype == weight.dtype and eps.dtype == torch.float32
    assert residual.shape == x.shape and weight.shape == x.shape[1:]
    normed, total = torch.empty_like(x), torch.empty_like(x)
    addresses = (normed.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr())
    rows_norm(ELEMENTS[x.dtype])(*addresses, eps.data_ptr(), num_rows, width)
    return normed, total
