"""Weights of products held in 8 bits, with scales: half of bfloat16's bytes to read, which is what decoding waits for.

Only weights are quantized. Rows keep their dtype, so a row's result depends on no other row's values, and a product is
that of the weights that the numbers and scales stand for. A scale serves the inputs of one group, of one output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinities
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
ROWS_AT_ONCE = 4096  # that are quantized, in float32
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}  # numbers of each type that weights are held in


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]."""

    numbers: Tensor  # [out_features, in_features] int8 or float8_e4m3fn
    scales: Tensor  # [out_features, groups] float32
    group_size: int  # inputs that share a scale; the last group may have fewer
    dtype: torch.dtype  # of the rows that it multiplies

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def shared_columns(self) -> int | None:
        """Inputs that share a scale; None: all do."""
        return self.group_size if self.scales.shape[1] > 1 else None

    def dense(self) -> Tensor:
        """The weight, each number times its scale in float32 and rounded to the dtype."""
        return expand(self.numbers, self.scales, self.group_size).to(self.dtype)


def expand(numbers: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """[out_features, in_features] float32."""
    width = numbers.shape[1]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(group_size, dim=1)[:, :width]
    return numbers.float() * scales


def num_groups(in_features: int, group_size: int) -> int:
    return -(-in_features // group_size)


def quantize(weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """To numbers of `dtype`, with a scale for each output: its largest weight becomes the largest number, the others go
    to the nearest.
    """
    out_features, in_features = weight.shape
    numbers = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(out_features, 1, device=weight.device)
    for start in range(0, out_features, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        exact = weight[rows].float()
        largest = exact.abs().amax(dim=1, keepdim=True)
        scales[rows] = torch.where(largest > 0, (largest / LARGEST[dtype]).clamp_(min=SMALLEST_SCALE), 1.0)
        scaled = (exact / scales[rows]).clamp_(-LARGEST[dtype], LARGEST[dtype])
        numbers[rows] = (scaled if dtype == FLOAT8 else scaled.round_()).to(dtype)
    return QuantizedWeight(numbers=numbers, scales=scales, group_size=in_features, dtype=weight.dtype)
