"""Weights of products held in 8 or 4 bits, with scales: fewer bytes to read, which is what decoding waits for.

Only weights are quantized. Rows keep their dtype, so a row's result depends on no other row's values, and a product is
that of the weights that the numbers and scales stand for. A scale serves the inputs of one group, of one output.

4 bits hold a code, which stands for a whole number, so a weight has the same products as one that holds these in 8.
An fp4's groups have scales of 8 bits, and each output one of 32 beside them. A number times the former is exact in
every dtype that rows have: kernels multiply by it before they add up, whatever the groups, and by the latter behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinities
Code = Literal["int4", "fp4"]  # its number is the code less a zero point; twice that of a float of OCP's type E2M1
ZERO = 8  # of an int4 whose weight states none
FP4_GROUP = 16  # inputs of an fp4 that share a scale of 8 bits; of MXFP4 twice as many share equal ones
FP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # by their codes
SPAN = 32  # inputs whose codes lie in SPAN / 2 bytes, as pack_codes says
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
ROWS_AT_ONCE = 4096  # that are quantized, in float32
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}  # numbers of each type that weights are held in


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]."""

    numbers: Tensor  # [out_features, in_features] int8 or float8_e4m3fn; of codes [out_features, in_features / 2] uint8
    scales: Tensor  # [out_features, groups] float32; of an fp4 [out_features, 1]
    group_size: int  # inputs that share a scale, of an fp4 FP4_GROUP; the last group may have fewer
    dtype: torch.dtype  # of the rows that it multiplies
    code: Code | None = None
    zeros: Tensor | None = None  # [out_features, groups] int8: zero points of an int4; None: all are ZERO
    # [out_features, block_columns] uint8, of an fp4: as block_scales_of reads them, nothing behind the last group's.
    block_scales: Tensor | None = None

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
        """Inputs that share a scale of 32 bits; None: all do."""
        return self.group_size if self.scales.shape[1] > 1 else None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it takes in memory, by the fields."""
        parts = {"numbers": self.numbers, "scales": self.scales, "zeros": self.zeros, "block_scales": self.block_scales}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def rows(self, rows: slice) -> QuantizedWeight:
        """A view of some outputs."""
        parts: dict[str, Any] = {name: tensor[rows] for name, tensor in self.tensors.items()}
        return replace(self, **parts)

    def in_8_bits(self) -> QuantizedWeight:
        """The same numbers: of codes what they stand for."""
        if self.code is None:
            return self
        numbers, scales = numbers_of(unpack_codes(self.numbers), self.code, self.zeros, self.group_size), self.scales
        if self.block_scales is not None:
            scales = scales * block_scales_of(self.block_scales[:, : self.shape[1] // FP4_GROUP])
        return replace(self, numbers=numbers, scales=scales, code=None, zeros=None, block_scales=None)

    def exact(self) -> Tensor:
        """[out_features, in_features] float32, each number times its scale."""
        wide = self.in_8_bits()
        return expand(wide.numbers, wide.scales, wide.group_size)

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


def block_scales_of(octets: Tensor) -> Tensor:
    """The float32 that uint8 of any shape stand for: (1 + f / 8) * 2**(e - 30), f in the lowest three bits, e above.

    None is 0, and none has an e of 31, an exponent that float16 keeps for what is infinite.
    """
    return ((octets.int() << 20) + (97 << 23)).view(torch.float32)


def as_block_scales(scales: Tensor) -> Tensor:
    """The other way round: uint8 of float32 that block_scales_of has among its results."""
    return ((scales.view(torch.int32) - (97 << 23)) >> 20).to(torch.uint8)


def block_columns(in_features: int) -> int:
    """Of block_scales: rows of theirs begin on 16 bytes, as kernels read several at once."""
    return -(-in_features // FP4_GROUP // 16) * 16


def pack_codes(codes: Tensor) -> Tensor:
    """[rows, in_features] -> [rows, in_features / 2], both uint8: of a span four words, which begin with the lowest.

    In words the codes are taken apart two at a time, from both halves. Of the four a half has the one that lies v
    above the lowest is that of input 8 v + 2 w of the span, w of the word, and the next input's lies in the other half.
    """
    octets = codes.reshape(len(codes), -1, 2, 2, 4, 2).permute(0, 1, 4, 5, 2, 3)  # spans, words, halves, v in octets
    return (octets[..., 0] | octets[..., 1] << 4).flatten(1)


def unpack_codes(packed: Tensor) -> Tensor:
    """[rows, in_features / 2] -> [rows, in_features], both uint8."""
    octets = packed.reshape(len(packed), -1, 4, 2, 2)
    return torch.stack((octets & 15, octets >> 4), dim=-1).permute(0, 1, 4, 5, 2, 3).flatten(1)


def codes_side_by_side(octets: Tensor) -> Tensor:
    """[rows, ...] -> [rows, 2 * columns], both uint8: the codes in the lower and in the higher bits of each."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def fits_codes(code: Code, in_features: int, group_size: int) -> bool:
    """Whether a weight's codes can be held in 4 bits: no span has an end, or a group of an int4 one within."""
    fits_groups = group_size == FP4_GROUP if code == "fp4" else group_size % SPAN == 0 or group_size >= in_features
    return in_features % SPAN == 0 and fits_groups


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
