"""kernels/reference/rms_norm.py in one pass over each row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.native import NativeKernel, floats

NOTHING, ONE = np.float32(0.0), np.float32(1.0)


def norm_rows(normed: int, total: int, x: int, residual: int, weight: int, eps: int, num_rows: int, width: int) -> None:
    """Addresses of float32; residual 0: there is none, and total is x."""
    to, rows, sums = floats(normed, num_rows, width), floats(x, num_rows, width), floats(total, num_rows, width)
    scales, added = floats(weight, 1, width)[0], floats(residual if residual else x, num_rows, width)
    for row in range(num_rows):
        squares = NOTHING
        if residual:
            for column in range(width):
                sums[row, column] = rows[row, column] + added[row, column]
        for column in range(width):
            squares += sums[row, column] * sums[row, column]
        scale = ONE / np.sqrt(squares / np.float32(width) + floats(eps, 1, 1)[0, 0])
        for column in range(width):
            to[row, column] = sums[row, column] * scale * scales[column]


_norm_rows = NativeKernel(norm_rows)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x: [num_rows, hidden], weight: [hidden], eps: [], all float32 -> [num_rows, hidden]."""
    x = x.contiguous()
    assert x.dtype == weight.dtype == eps.dtype == torch.float32 and weight.shape == x.shape[1:]
    normed, rows, (num_rows, width) = torch.empty_like(x), x.data_ptr(), x.shape
    _norm_rows(normed.data_ptr(), rows, rows, 0, weight.data_ptr(), eps.data_ptr(), num_rows, width)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), all [num_rows, hidden] float32."""
    x, residual, (num_rows, width) = x.contiguous(), residual.contiguous(), x.shape
    assert x.dtype == residual.dtype == weight.dtype == eps.dtype == torch.float32
    assert residual.shape == x.shape and weight.shape == x.shape[1:]
    normed, total = torch.empty_like(x), torch.empty_like(x)
    addresses = (normed.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr())
    _norm_rows(*addresses, eps.data_ptr(), num_rows, width)
    return normed, total
