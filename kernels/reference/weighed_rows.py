"""A root mean square norm in two halves, so that it needs no launch between two products.

norm(x) W^T = f (x * w) W^T, where w is the norm's weight and f = 1 / sqrt(mean(x^2) + eps) a number of each row. What
adds a product to the residual stream writes x * w beside the sum, and sums of x^2 over a few columns; the product that
reads x * w multiplies its sums by f. Rows are rounded once, behind w, where a norm rounds them behind f and behind w.

Squares are exact, those of 16-bit numbers in float32 and those of float32 in float64, and they are added two by two:
neighbours, then neighbours of those, and the parts by halves. Sums of more would be in an order of whatever computes
them, and inexact squares fused with a sum or not; so a row's bits are its own. (Below 2^-63 squares are not exact, and
nothing beside eps.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

PART = 64  # columns whose squares are one sum, a power of 2


@dataclass(frozen=True, kw_only=True)
class WeighedRows:
    """norm(x) without its factor."""

    rows: torch.Tensor  # [num_rows, hidden], x * weight
    squares: torch.Tensor  # [num_rows, parts] float32: sums of x^2, each over PART columns
    eps: torch.Tensor  # [] float32

    def factors(self) -> torch.Tensor:
        """[num_rows, 1] float32."""
        total = F.pad(self.squares, (0, -self.squares.shape[1] % (1 << (self.squares.shape[1] - 1).bit_length())))
        while total.shape[1] > 1:
            first, second = total.chunk(2, dim=1)
            total = first + second
        return torch.rsqrt(total * (1.0 / self.rows.shape[1]) + self.eps)


def add_neighbours(values: torch.Tensor, number: int) -> torch.Tensor:
    """[num_rows, n * number] -> [num_rows, n]; number is a power of 2."""
    while number > 1:
        values, number = values[:, ::2] + values[:, 1::2], number // 2
    return values


def weigh_rows(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> WeighedRows:
    """x: [num_rows, hidden]; weight: [hidden], of x's dtype or float32; eps: [] float32."""
    wide = x.double() if x.dtype == torch.float32 else x.float()
    squares = add_neighbours(F.pad(wide * wide, (0, -x.shape[1] % PART)), PART)
    return WeighedRows(rows=(x.float() * weight.float()).to(x.dtype), squares=squares.float(), eps=eps)


def linear_to_norm(
    x: torch.Tensor,  # [num_rows, in_features]
    weight: torch.Tensor,  # [hidden, in_features]
    bias: torch.Tensor | None,  # [hidden]
    residual: torch.Tensor,  # [num_rows, hidden]
    norm_weight: torch.Tensor,  # [hidden], of x's dtype or float32
    eps: torch.Tensor,  # [] float32
) -> tuple[WeighedRows, torch.Tensor]:
    """What is left of norm(x W^T + bias + residual), and the sum in the norm [num_rows, hidden], rounded once."""
    added = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    total = (added + residual.float()).to(x.dtype)
    return weigh_rows(total, norm_weight, eps), total
