"""y = x W^T + b with a row's bits independent of how many rows share the launch.

BLAS picks another kernel, and another summation order, for another number of rows, and with several threads it may
split the sum itself among them, by the shape of the whole call: measured on one CPU, float32 products change bits
between 1, 2..11 and 12 or more rows, and a batched product of 1 tile differs from one of 2 with 2 threads. So every
call here is the same one, `tile` rows, and a launch is a loop of such calls. kernels/cpu/linear.py needs no tiles.
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
    if tile is None or len(x) == tile:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(rows, weight, bias) for rows in x.chunk(len(x) // tile)])


def rows_keep_their_bits(weight: torch.Tensor, tile: int) -> bool:
    """Whether, on this machine, a row's result does not depend on its place in a tile: equal rows, equal results.

    The one thing equal calls do not settle: a BLAS may end a tile with another kernel than it began it with.
    """
    generator = torch.Generator(weight.device).manual_seed(0)
    row = torch.randn(1, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    results = linear(row.expand(tile, -1).contiguous(), weight, None, tile)
    return torch.equal(results, results[:1].expand_as(results))
