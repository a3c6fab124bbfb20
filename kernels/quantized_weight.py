"""Weights of products held in 8 or 4 bits, with scales: fewer bytes to read, which is what decoding waits for.

Only weights are quantized. Rows keep their dtype, so a row's result depends on no other row's values, and a product is
that of the weights that the numbers and scales stand for. A scale serves the inputs of one group, of one output.

4 bits hold a code, which stands for a whole number, so a weight has the same products as one that holds these in 8.
An fp4's groups have scales of 8 bits, and each output one of 32 beside them. A number times one of 8 is exact
in every dtype that rows have: kernels multiply by it before they add up, whatever the groups, and by one of 32 behind.

Kernels of a GPU read numbers and codes in words (kernels/words.py). Those of a CPU have panels, which are made of a
weight that holds them as they come, of codes two to an octet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import words
from kernels.words import Kind

FLOAT8 = torch.float8_e4m3fn  # an fp8: 4 bits of exponent, 3 of mantissa, no infinities
# An int4's number is its code less a zero point; an fp4's twice that of a float of OCP's type E2M1.
CODES = ("int4", "fp4")
DTYPES: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": FLOAT8, "int4": torch.uint8, "fp4": torch.uint8}
ZERO = 8  # of an int4 whose weight states none
FP4_GROUP = 16  # inputs of an fp4 that share a scale of 8 bits; of MXFP4 twice as many share equal ones
FP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # by their codes
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
ROWS_AT_ONCE = 4096  # that are quantized, in float32, or put into words
LARGEST: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}  # numbers of those that any weight can be held in


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]."""

    kind: Kind
    in_features: int
    # [out_features, in_features] int8 or float8_e4m3fn; of codes [out_features, in_features / 2] uint8, the first of
    # two in the lower bits; in words [out_features, words] int32.
    numbers: Tensor
    scales: Tensor  # [out_features, groups] float32; of an fp4 [out_features, 1]
    group_size: int  # inputs that share a scale, of an fp4 FP4_GROUP; the last group may have fewer
    dtype: torch.dtype  # of the rows that it multiplies
    zeros: Tensor | None = None  # [out_features, groups] int8: zero points of an int4; None: all are ZERO
    # [out_features, block_columns] uint8, of an fp4: as block_scales_of reads them, nothing behind the last group's.
    block_scales: Tensor | None = None
    is_in_words: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.numbers), self.in_features))

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def has_codes(self) -> bool:
        return self.kind in CODES

    @property
    def has_zeros(self) -> bool:
        return self.zeros is not None

    @property
    def number_bits(self) -> int:
        return 4 if self.has_codes else 8

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

    def spread(self) -> Tensor:
        """[out_features, in_features] of DTYPES: the numbers, or codes, one to a place."""
        if self.is_in_words:
            return words.spread(self.numbers, self.kind, self.in_features)
        return codes_side_by_side(self.numbers) if self.has_codes else self.numbers

    def hold(self, spread: Tensor) -> None:
        """Have these numbers, or codes, in place of its own, which are as many."""
        for start in range(0, len(spread), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            some = spread[rows].to(self.device)  # which is quick at what follows
            if self.is_in_words:
                some = words.in_words(some, self.kind)
            elif self.has_codes:
                some = some[:, ::2] | some[:, 1::2] << 4
            self.numbers[rows].copy_(some)

    def in_words(self) -> QuantizedWeight:
        """The same weight as kernels of a GPU read it."""
        if self.is_in_words:
            return self
        numbers = empty_numbers(self.kind, *self.shape, in_words=True, device=self.device)
        found = replace(self, numbers=numbers, is_in_words=True)
        found.hold(self.spread())
        return found

    def in_8_bits(self) -> QuantizedWeight:
        """The same numbers, not in words: of codes what they stand for."""
        if not self.has_codes:
            return replace(self, numbers=self.spread(), is_in_words=False)
        numbers, scales = numbers_of(self.spread(), self.kind, self.zeros, self.group_size), self.scales
        if self.block_scales is not None:
            scales = scales * block_scales_of(self.block_scales[:, : self.in_features // FP4_GROUP])
        return replace(
            self, kind="int8", numbers=numbers, scales=scales, zeros=None, block_scales=None, is_in_words=False
        )

    def exact(self) -> Tensor:
        """[out_features, in_features] float32, each number times its scale."""
        wide = self.in_8_bits()
        return expand(wide.numbers, wide.scales, wide.group_size)

    def dense(self) -> Tensor:
        """The weight as `exact` says, rounded to the dtype."""
        return self.exact().to(self.dtype)


def empty_numbers(
    kind: Kind, out_features: int, in_features: int, *, in_words: bool, device: torch.device | None = None
) -> Tensor:
    """As QuantizedWeight.numbers has them. device: None for the default."""
    if in_words:
        return torch.empty(out_features, words.num_words(kind, in_features), dtype=torch.int32, device=device)
    columns = in_features // 2 if kind in CODES else in_features
    return torch.empty(out_features, columns, dtype=DTYPES[kind], device=device)


def numbers_of(codes: Tensor, kind: Kind, zeros: Tensor | None, group_size: int) -> Tensor:
    """[out_features, in_features], codes and the int8 that they stand for."""
    if kind == "fp4":
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


def codes_side_by_side(octets: Tensor) -> Tensor:
    """[rows, ...] -> [rows, 2 * columns], both uint8: the codes in the lower and in the higher bits of each."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def fits_codes(kind: Kind, in_features: int, group_size: int) -> bool:
    """Whether a weight's codes can be held in 4 bits: no span has an end, or a group of an int4 one within."""
    span = words.INPUTS[kind]
    fits_groups = group_size == FP4_GROUP if kind == "fp4" else group_size % span == 0 or group_size >= in_features
    return in_features % span == 0 and fits_groups


def expand(numbers: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """[out_features, in_features] float32."""
    width = numbers.shape[1]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(group_size, dim=1)[:, :width]
    return numbers.float() * scales


def num_groups(in_features: int, group_size: int) -> int:
    return -(-in_features // group_size)


def quantize(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """To one of LARGEST, with a scale for each output: its largest weight becomes the largest number, the others go to
    the nearest.
    """
    (out_features, in_features), largest_number = weight.shape, LARGEST[kind]
    numbers = torch.empty(weight.shape, dtype=DTYPES[kind], device=weight.device)
    scales = torch.empty(out_features, 1, device=weight.device)
    for start in range(0, out_features, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        exact = weight[rows].float()
        largest = exact.abs().amax(dim=1, keepdim=True)
        scales[rows] = torch.where(largest > 0, (largest / largest_number).clamp_(min=SMALLEST_SCALE), 1.0)
        scaled = (exact / scales[rows]).clamp_(-largest_number, largest_number)
        numbers[rows] = (scaled if kind == "fp8" else scaled.round_()).to(DTYPES[kind])
    return QuantizedWeight(
        kind=kind, in_features=in_features, numbers=numbers, scales=scales, group_size=in_features, dtype=weight.dtype
    )
