"""What the ranks of a tensor-parallel group computed of a product, added up in the order of the ranks.

A ring or a tree of them would add in an order that goes by the size of the message, and a row's bits with it.
"""

from __future__ import annotations

from torch import Tensor


def sum_of_ranks(parts: Tensor) -> Tensor:
    """[num_ranks, num_rows, width] -> [num_rows, width]: ((0 + 1) + 2) + ... in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)
