"""The kinds of numbers that panels hold, by what kernels are compiled for: indices of KINDS."""

from __future__ import annotations

import torch

from kernels.cpu.float_kinds import BFloat16, BFloat16Pairs, Float16, Float32
from kernels.cpu.panels import multiplies_pairs
from kernels.cpu.scaled_kinds import Float8, Fp4, Int4, Int8
from kernels.cpu.scaled_pairs import Float8Pairs, Fp4Pairs, Int4Pairs, Int8Pairs, WidePairs
from kernels.quantized_weight import FLOAT8, Code

SCALED_PAIRS = (Int8Pairs(), Float8Pairs(), Int4Pairs(has_zeros=False), Int4Pairs(has_zeros=True), Fp4Pairs())
KINDS: tuple[Float32, ...] = (
    *(Float32(), Float16(), BFloat16(), BFloat16Pairs()),
    *(Int8(), Float8(), Int4(has_zeros=False), Int4(has_zeros=True), Fp4()),
    *SCALED_PAIRS,  # of the same numbers
    *map(WidePairs, SCALED_PAIRS[:2]),
)


OF_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.int8: 4, FLOAT8: 5}
OF_CODES = {("int4", False): 6, ("int4", True): 7, ("fp4", False): 8}  # and whether they have zero points


def kind_of(numbers: torch.dtype, *, in_pairs: bool = False) -> int:
    """Of numbers of this type: an index of KINDS. in_pairs: as those of 8 bits may lie."""
    if numbers == torch.bfloat16:
        return 2 + multiplies_pairs()
    return OF_NUMBERS[numbers] + in_pairs * len(SCALED_PAIRS)


def kind_of_codes(code: Code, *, has_zeros: bool, in_pairs: bool) -> int:
    return OF_CODES[code, has_zeros] + in_pairs * len(SCALED_PAIRS)


def wide_kind(kind: int) -> int:
    """Of panels that `widen` leaves."""
    return kind + len(SCALED_PAIRS) if KINDS[kind].scales_sums else OF_NUMBERS[torch.float32]
