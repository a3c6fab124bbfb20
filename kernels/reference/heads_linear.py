"""Products of heads, each with a weight of its own; a row's bits are its own, as kernels/reference/linear.py has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.reference.linear import linear


def linear_of_heads(
    x: torch.Tensor,  # [num_rows, num_heads, in_features], num_rows a multiple of tile
    weights: Sequence[torch.Tensor],  # of each head [out_features, in_features]
    tile: int | None,  # as linear has it
) -> torch.Tensor:  # [num_rows, num_heads, out_features]
    products = [linear(x[:, head].contiguous(), weight, None, tile) for head, weight in enumerate(weights)]
    return torch.stack(products, dim=1)
