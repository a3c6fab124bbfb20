"""y = x W^T + b with a row's bits independent of how many rows share the launch.

BLAS picks another kernel, and another summation order, for another number of rows (measured: float32 sgemm
changes bits between 1, 2..11 and 12 or more rows on one CPU, between 3 and 4 on another). So every product
here has the same shape, `tile` rows, and a launch is a batch of such products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor,  # [num_rows, in_features], num_rows a multiple of tile
    weight: torch.Tensor,  # [out_features, in_features]
    bias: torch.Tensor | None,  # [out_features]
    tile: int | None,  # rows of one product; None = one product of any shape, not row-invariant
) -> torch.Tensor:  # [num_rows, out_features]
    if tile is None:
        return F.linear(x, weight, bias)
    num_rows, in_features = x.shape
    num_tiles = num_rows // tile
    out = torch.bmm(x.view(num_tiles, tile, in_features), weight.t().expand(num_tiles, -1, -1))
    out = out.view(num_rows, -1)
    return out if bias is None else out.add_(bias)
