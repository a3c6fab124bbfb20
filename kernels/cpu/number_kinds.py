"""The kinds of numbers that panels hold, by what kernels are compiled for: indices of KINDS."""

from __future__ import annotations

import torch

from kernels.cpu.float_kinds import BFloat16, BFloat16Pairs, Float16, Float32
from kernels.cpu.panels import multiplies_pairs
from kernels.cpu.scaled_kinds import Float8, Fp4, Int4, Int8
from kernels.cpu.scaled_pairs import Float8Pairs, Fp4Pairs, Int4Pairs, Int8Pairs, WidePairs
from kernels.words import Kind

SCALED_PAIRS = (Int8Pairs(), Float8Pairs(), Int4Pairs(has_zeros=False), Int4Pairs(has_zeros=True), Fp4Pairs())
KINDS: tuple[Float32, ...] = (
    *(Float32(), Float16(), BFloat16(), BFloat16Pairs()),
    *(Int8(), Float8(), Int4(has_zeros=False), Int4(has_zeros=True), Fp4()),
    *SCALED_PAIRS,  # of the same numbers
    *map(WidePairs, SCALED_PAIRS[:2]),
)


OF_NUMBERS = {torch.float32: 0, torch.float16: 1}
# And whether they have zero points.
OF_QUANTIZED: dict[tuple[Kind, bool], int] = {
    ("int8", False): 4,
    ("fp8", False): 5,
    ("int4", False): 6,
    ("int4", True): 7,
    ("fp4", False): 8,
}


def kind_of(numbers: torch.dtype) -> int:
    """Of dense panels: an index of KINDS."""
    return 2 + multiplies_pairs() if numbers == torch.bfloat16 else OF_NUMBERS[numbers]


def kind_of_quantized(kind: Kind, *, has_zeros: bool, in_pairs: bool) -> int:
    """in_pairs: as inputs may lie where rows are bfloat16."""
    return OF_QUANTIZED[kind, has_zeros] + in_pairs * len(SCALED_PAIRS)


def wide_kind(kind: int) -> int:
    """Of panels that `widen` leaves."""
    return kind + len(SCALED_PAIRS) if KINDS[kind].scales_sums else OF_NUMBERS[torch.float32]
