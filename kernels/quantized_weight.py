"""Weights of products held in 8 or 4 bits, with scales: fewer bytes to read, which is what decoding waits for.

Only weights are quantized. Rows keep their dtype, so a row's result depends on no other row's values, and a product is
that of the weights that the numbers and scales stand for. A scale serves the inputs of one group, of one output.

4 bits hold a code, which stands for a whole number, so a weight has the same products as one that holds these in 8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinities
Code = Literal["int4", "fp4"]  # its number is the code less a zero point; twice that of a float of OCP's type E2M1
ZERO = 8  # of an int4 whose weight states none
FP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # by their codes
SPAN = 32  # inputs whose codes lie in SPAN / 2 bytes: in the lower bits of each one of the first half
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
ROWS_AT_ONCE = 4096  # that are quantized, in float32
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}  # numbers of each type that weights are held in


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]."""

    numbers: Tensor  # [out_features, in_features] int8 or float8_e4m3fn; of codes [out_features, in_features / 2] uint8
    scales: Tensor  # [out_features, groups] float32
    group_size: int  # inputs that share a scale; the last group may have fewer
    dtype: torch.dtype  # of the rows that it multiplies
    code: Code | None = None
    zeros: Tensor | None = None  # [out_features, groups] int8: zero points of an int4; None: all are ZERO

    @property
    def shape(self) -> torch.Size:
        out_features, columns = self.numbers.shape
        return torch.Size((out_features, columns if self.code is None else 2 * columns))

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def has_zeros(self) -> bool:
        return self.zeros is not None

    @property
    def number_bits(self) -> int:
        return 8 if self.code is None else 4

    @property
    def shared_columns(self) -> int | None:
        """Inputs that share a scale; None: all do."""
        return self.group_size if self.scales.shape[1] > 1 else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it takes in memory, by the fields."""
        found = {"numbers": self.numbers, "scales": self.scales}
        return found if self.zeros is None else {**found, "zeros": self.zeros}

    def rows(self, rows: slice) -> QuantizedWeight:
        """A view of some outputs."""
        parts: dict[str, Any] = {name: tensor[rows] for name, tensor in self.tensors.items()}
        return replace(self, **parts)

    def in_8_bits(self) -> QuantizedWeight:
        """The same numbers: of codes what they stand for."""
        if self.code is None:
            return self
        numbers = numbers_of(unpack_codes(self.numbers), self.code, self.zeros, self.group_size)
        return replace(self, numbers=numbers, code=None, zeros=None)

    def exact(self) -> Tensor:
        """[out_features, in_features] float32, each number times its scale."""
        return expand(self.in_8_bits().numbers, self.scales, self.group_size)

    def dense(self) -> Tensor:
        """The weight as `exact` says, rounded to the dtype."""
        return self.exact().to(self.dtype)


def numbers_of(codes: Tensor, code: Code, zeros: Tensor | None, group_size: int) -> Tensor:
    """[out_features, in_features], codes and the int8 that they stand for."""
    if code == "fp4":
        return torch.tensor(FP4_NUMBERS, dtype=torch.int8, device=codes.device)[codes.int()]
    if zeros is not None and zeros.shape[1] > 1:
        zeros = zeros.repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]
    return codes.to(torch.int8) - (ZERO if zeros is None else zeros)


def pack_codes(codes: Tensor) -> Tensor:
    """[rows, in_features] -> [rows, in_features / 2], both uint8."""
    halves = codes.reshape(len(codes), -1, 2, SPAN // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def unpack_codes(packed: Tensor) -> Tensor:
    """[rows, in_features / 2] -> [rows, in_features], both uint8."""
    spans = packed.reshape(len(packed), -1, SPAN // 2)
    return torch.stack((spans & 15, spans >> 4), dim=2).flatten(1)


def codes_side_by_side(octets: Tensor) -> Tensor:
    """[rows, ...] -> [rows, 2 * columns], both uint8: the codes in the lower and in the higher bits of each."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def fits_codes(in_features: int, group_size: int) -> bool:
    """Whether a weight's codes can be held in 4 bits: no span has an end, and none or just its halves are of groups."""
    return in_features % SPAN == 0 and (group_size % SPAN == 0 or group_size == SPAN // 2 or group_size >= in_features)


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
