"""Sums over the vocabulary by which distributions are made and compared."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(rows: Tensor) -> Tensor:
    """Sums of the rows in float64, in an order of their own, so that a row's bits do not depend on the others.

    On a CPU from the left. On a GPU, where torch's sums and scans go by the number of rows, halves are added to halves.
    """
    if not rows.is_cuda:
        return rows.cumsum(dim=-1, dtype=torch.float64)[:, -1]
    sums = rows.to(torch.float64, copy=True)
    while (width := sums.shape[1]) > 1:
        half = (width + 1) // 2
        sums[:, : width - half] += sums[:, half:]
        sums = sums[:, :half]
    return sums[:, 0]
