"""What quantized numbers become where pairs of bfloat16 are multiplied, which hold them exactly: sums are scaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir

from kernels.cpu.float_kinds import MANY_ROWS, TURN_ROWS, BFloat16Pairs
from kernels.cpu.native import call_llvm
from kernels.cpu.panels import LANES
from kernels.cpu.scaled_kinds import bits_of_float8, scales_of_block
from kernels.cpu.vectors import BYTES, FLOATS, HALF_WORDS, WORDS, load, number
from kernels.quantized_weight import FP4_NUMBERS, ZERO


class CodePairs(BFloat16Pairs):
    """A step takes eight inputs, whose codes share a word: four instructions, as numbers are exact in bfloat16."""

    row_bytes, step_inputs, scales_sums = 16, 8, True
    unrolled, asked_lines, turn_rows = 2, 4, TURN_ROWS - 1  # of more, sums do not stay in registers
    table: tuple[int, ...] = ()  # of numbers, by codes

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        codes = load(builder, address, HALF_WORDS, self.vector_bytes)
        bits = torch.tensor(self.table).bfloat16().view(torch.int16).tolist()
        for pair in range(4):
            # The table is looked up by five bits, of which the highest makes no difference where there are no zeros.
            places = builder.lshr(codes, ir.Constant(HALF_WORDS, [4 * pair] * 2 * LANES)) if pair else codes
            for more in of_group[1:]:
                places = builder.add(builder.and_(places, ir.Constant(HALF_WORDS, [15] * 2 * LANES)), more)
            name, own = "llvm.x86.avx512.permvar.hi.512", [ir.Constant(HALF_WORDS, bits), places]
            yield builder.bitcast(call_llvm(builder, name, HALF_WORDS, own), WORDS)


class Int4Pairs(CodePairs):
    """A zero point moves the places of its group's codes in a table of all differences."""

    def __init__(self, *, has_zeros: bool) -> None:
        self.has_zeros = has_zeros
        self.table = (*range(-15, 16), 0) if has_zeros else tuple(code % 16 - ZERO for code in range(2 * LANES))

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        own = load(builder, scales, FLOATS, 4)
        if not self.has_zeros:
            return (own,)
        points = builder.fptosi(load(builder, zeros, FLOATS, 4), WORDS)
        more = builder.sub(ir.Constant(WORDS, [15] * LANES), points)
        both = builder.or_(more, builder.shl(more, ir.Constant(WORDS, [16] * LANES)))
        return own, builder.bitcast(both, HALF_WORDS)


class Fp4Pairs(CodePairs):
    table, has_blocks = FP4_NUMBERS * 2, True

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        return (scales_of_block(builder, scales, block_scales),)


class Int8Pairs(BFloat16Pairs):
    """A step takes two lines of a panel in one instruction, as bfloat16 holds the numbers exactly."""

    vector_bytes, lines, widens_from, scales_sums = LANES, 2, MANY_ROWS, True

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        return (load(builder, scales, FLOATS, 4),)

    def as_floats(self, builder: Any, octets: Any) -> Any:
        return builder.sitofp(builder.sext(octets, WORDS), FLOATS)

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        places = (address, builder.add(address, number(line_bytes)))
        first, second = (self.as_floats(builder, load(builder, place, BYTES, LANES)) for place in places)
        low = builder.lshr(builder.bitcast(first, WORDS), ir.Constant(WORDS, [16] * LANES))
        high = builder.and_(builder.bitcast(second, WORDS), ir.Constant(WORDS, [0xFFFF0000] * LANES))
        yield builder.or_(low, high)


class Float8Pairs(Int8Pairs):
    widens_from = TURN_ROWS + 3

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        return (builder.fmul(load(builder, scales, FLOATS, 4), ir.Constant(FLOATS, [2.0**-120] * LANES)),)

    def as_floats(self, builder: Any, octets: Any) -> Any:
        return builder.fmul(bits_of_float8(builder, octets), ir.Constant(FLOATS, [2.0**120] * LANES))


class WidePairs(BFloat16Pairs):
    """Factors that others left."""

    scales_sums = True

    def __init__(self, pairs: Int8Pairs) -> None:
        self.of_group = pairs.of_group  # type: ignore[method-assign]
