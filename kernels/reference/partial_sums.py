"""A product that is left in partial sums, which the launch behind it adds up while it reads them.

To add them up itself, a product would wait for its last program to have stored its part; the launch behind it waits for
that anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PartialSums:
    """Rows [num_rows, width] of a dtype: ((0 + p0) + p1) + ..., scaled, with the bias, rounded once."""

    parts: torch.Tensor  # [num_parts, num_rows, width] float32
    scales: torch.Tensor | None  # [width, 1] float32, of a quantized weight whose outputs have one each
    bias: torch.Tensor | None  # [width], of the dtype
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.parts.shape[1:]

    def total(self) -> torch.Tensor:
        """[num_rows, width]."""
        total = torch.zeros_like(self.parts[0])
        for part in self.parts:
            total += part
        if self.scales is not None:
            total *= self.scales.squeeze(1)
        if self.bias is not None:
            total += self.bias
        return total.to(self.dtype)
