"""Weights of products in the order in which kernels/cpu/linear.py and linear_amx.py read them: panels of neighbours.

A panel holds, for one input after another, the weights of all its outputs, so that the sums of outputs lie side by side
in vector lanes, or in a matrix unit's tiles, and each is added up alone, from the first input to the last. Nothing of
an output's bits depends on where it lies, so the width of a panel is free.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.huge_pages import in_huge_pages
from kernels.quantized_weight import (
    CODES,
    FLOAT8,
    FP4_GROUP,
    QuantizedWeight,
    block_scales_of,
    codes_side_by_side,
    expand,
    numbers_of,
)
from kernels.words import Kind

LANES = 16  # outputs of one vector: one register of AVX-512, two of AVX2, four of NEON
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What scales of such numbers in panels are multiplied by: the bits of a float8 are read as a float32's, whose exponents
# count from 120 further below.
WORTH: dict[Kind, float] = {"int8": 1.0, "fp8": 2.0**120, "int4": 1.0, "fp4": 1.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Panels:
    """A weight [out_features, in_features], laid out for good: it can neither be indexed nor written."""

    shape: torch.Size  # of the weight
    dtype: torch.dtype  # of the rows that it multiplies
    # [panels, in_features / inputs, width, inputs]: inputs that a step takes lie side by side. Of codes [panels,
    # in_features / 2, width, 1] uint8, the first of two inputs in the lower bits; where pairs are multiplied [panels,
    # in_features / 8, width, 1] int32, the first of each two in the lower half.
    numbers: Tensor
    # Of a quantized weight [panels, groups, 1, width] float32; with zero points behind its scales [panels, groups, 2,
    # width]. An fp4 has one of them all, and block scales.
    scales: Tensor | None = None
    block_scales: Tensor | None = None  # [panels, groups, width] uint8
    group_size: int = 0  # inputs that share a scale
    kind: Kind | None = None  # as QuantizedWeight.kind

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def width(self) -> int:
        """Outputs of a panel; those of the last one that the weight lacks are zeros."""
        return self.numbers.shape[2]

    @property
    def has_zeros(self) -> bool:
        return self.scales is not None and self.scales.shape[2] > 1

    @property
    def has_words(self) -> bool:
        """Of eight codes."""
        return self.numbers.dtype == torch.int32

    def dense(self) -> Tensor:
        """The weight again, as a copy."""
        columns = self.numbers.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
        weight = columns[: self.shape[0]].contiguous()
        if self.scales is None or self.kind is None:
            return weight
        beside = self.scales.permute(2, 0, 3, 1).flatten(1, 2)[:, : self.shape[0]]
        scales = beside[0] / WORTH[self.kind]
        if self.kind in CODES:
            zeros = beside[1].to(torch.int8) if self.has_zeros else None
            codes = codes_of_words(weight) if self.has_words else codes_side_by_side(weight)
            weight = numbers_of(codes, self.kind, zeros, self.group_size)
        if self.block_scales is not None:
            scales = scales * block_scales_of(self.block_scales.transpose(1, 2).flatten(0, 1)[: self.shape[0]])
        return expand(weight, scales, self.group_size).to(self.dtype)


Weight = Tensor | QuantizedWeight | Panels
Change = Callable[[Weight], Weight]  # how a weight is laid out or held


def can_pack(weight: Weight) -> bool:
    """Whether this machine computes products with such a weight from panels."""
    if isinstance(weight, Panels):
        return True
    is_whole = isinstance(weight, QuantizedWeight) or weight.shape[1] % inputs_of_a_step(weight.dtype) == 0
    return weight.dtype in DTYPES and is_whole and weight.device.type == "cpu" and multiplies_and_adds()


def pack(weight: Weight) -> Weight:
    """A copy of the weight as panels; itself where it is one, or where `can_pack` says no."""
    if isinstance(weight, Panels) or not can_pack(weight):
        return weight
    width = panel_width(weight.shape[0])
    if isinstance(weight, Tensor):
        return Panels(shape=weight.shape, dtype=weight.dtype, numbers=_panels(weight, width))
    size = weight.group_size
    assert not weight.is_in_words, "that order is a GPU's"
    assert size & (size - 1) == 0 or size >= weight.shape[1], "sums are scaled so many inputs at a time, or cut so"
    in_words = weight.has_codes and weight.dtype == torch.bfloat16 and multiplies_pairs()
    if weight.zeros is not None and not in_words and weight.scales.view(torch.int32).bitwise_and(15).any():
        weight = weight.in_8_bits()  # times a zero point, of 4 bits, such scales would be rounded (scaled_kinds.Int4)
    beside = [weight.scales * WORTH[weight.kind]]
    if weight.zeros is not None:
        beside.append(weight.zeros.float())
    numbers, block_scales = weight.numbers, weight.block_scales
    if block_scales is not None:
        block_scales = _panels(block_scales[:, : weight.shape[1] // FP4_GROUP], width).squeeze(-1)
    if in_words:
        numbers = words_of_codes(weight.spread())
    return Panels(
        shape=weight.shape,
        dtype=weight.dtype,
        numbers=_panels(numbers, width),
        scales=torch.stack([_panels(part, width).squeeze(-1) for part in beside], dim=2),
        block_scales=block_scales,
        group_size=weight.group_size,
        kind=weight.kind,
    )


def words_of_codes(codes: Tensor) -> Tensor:
    """[rows, in_features] uint8 -> [rows, in_features / 8] int32: of each two inputs the first in the lower half."""
    octets = codes.reshape(len(codes), -1, 2, 2, 2).transpose(3, 4).transpose(2, 3)  # halves, their octets, codes
    return (octets[..., 0] | octets[..., 1] << 4).flatten(1).view(torch.int32)


def codes_of_words(words: Tensor) -> Tensor:
    """The other way round."""
    octets = words.view(torch.uint8).reshape(len(words), -1, 2, 2)
    return torch.stack((octets & 15, octets >> 4), dim=-1).transpose(2, 3).transpose(3, 4).flatten(1)


def _panels(rows: Tensor, width: int) -> Tensor:
    """[out_features, columns] -> [panels, columns / inputs, width, inputs], zeros for outputs that there are not."""
    (num_rows, num_columns), inputs = rows.shape, inputs_of_a_step(rows.dtype)
    kind = rows.dtype
    rows = rows.view(torch.uint8) if kind == FLOAT8 else rows  # which torch cannot pad
    rows = F.pad(rows, (0, 0, 0, -num_rows % width)) if num_rows % width else rows
    columns = rows.reshape(-1, width, num_columns // inputs, inputs).permute(0, 2, 1, 3)
    # Vectors are read whole: a copy of its own begins on a line, as all that torch allocates.
    return in_huge_pages(torch.empty(columns.shape, dtype=rows.dtype, device=rows.device)).copy_(columns).view(kind)


def unpack(weight: Weight) -> Tensor:
    """The weight as a tensor; of panels, and of a quantized one, a copy."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def tensors_of(weight: Weight) -> list[Tensor]:
    """What it takes in memory."""
    if isinstance(weight, Tensor):
        return [weight]
    if isinstance(weight, QuantizedWeight):
        return list(weight.tensors.values())
    return [part for part in (weight.numbers, weight.scales, weight.block_scales) if part is not None]


def unpacked(weight: Weight) -> Tensor:
    """The weight itself, which is to be filled or cut, is dense, and has not become panels."""
    assert isinstance(weight, Tensor), "panels are for good, and what is quantized is no tensor"
    return weight


def inputs_of_a_step(dtype: torch.dtype) -> int:
    """bfloat16 lies in pairs, as the instruction that multiplies two of them takes it, or as one word that is cut."""
    return 2 if dtype == torch.bfloat16 else 1


def panel_width(out_features: int) -> int:
    """A multiple of LANES: as many sums as there are registers for, but panels enough for the threads to share."""
    widest = 4 if has_feature("avx512f") else 1
    enough = -(-out_features // LANES) // (4 * torch.get_num_threads())
    return LANES * min(widest, 1 << max(enough.bit_length() - 1, 0))


@cache
def multiplies_and_adds() -> bool:
    """In one instruction, without which a compiler would call a function, and in threads that torch shares with us."""
    from kernels.cpu.threads import has_openmp  # loads numba, which is of no use on a GPU

    return (is_arm() or has_feature("fma")) and has_openmp()


def is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def multiplies_pairs() -> bool:
    """Of bfloat16 in one instruction, as every CPU with a matrix unit does."""
    return has_feature("avx512bf16")


@cache
def has_feature(name: str) -> bool:
    """Of this CPU, by LLVM's name."""
    from llvmlite import binding  # late: of no use on a GPU, and vLLM's build for CPUs fails where it came first

    return bool(binding.get_host_cpu_features().get(name))
