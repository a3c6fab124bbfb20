"""What the numbers of a panel's weights become, in vector lanes, before rows are multiplied by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from llvmlite import ir

from kernels.cpu.native import call_llvm
from kernels.cpu.panels import LANES, is_arm, multiplies_pairs
from kernels.quantized_weight import FLOAT8, FP4_NUMBERS, ZERO, Code

INT, WORD, BYTE, FLOAT, HALF = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType(), ir.HalfType()
FLOATS, WORDS, BYTES, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, WORD, BYTE, HALF))
HALF_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
TURN_ROWS = 6  # that share a panel's registers
FUSED = f"llvm.fma.v{LANES}f32"
MANY_ROWS, NEVER = 3 * TURN_ROWS + 1, 1 << 30


def number(value: int, kind: Any = INT) -> Any:
    return ir.Constant(kind, value)


def every_lane(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    alone = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, number(0, WORD))
    return builder.shuffle_vector(alone, ir.Constant(kind, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def fused_multiply_add(builder: Any, factor: Any, factors: Any, total: Any) -> Any:
    return call_llvm(builder, FUSED, FLOATS, [every_lane(builder, factor), factors, total])


class Float32:
    """A step takes one input: of a row 4 bytes, of LANES outputs a vector."""

    row_bytes, step_inputs, vector_bytes = 4, 1, 4 * LANES
    lines = 1  # of a panel
    # As many rows, then float32, as are faster where float32 factors are made once and not in each turn.
    widens_from = NEVER
    has_zeros = False  # zero points behind the scales
    has_blocks = False  # block scales, one for each group, and one scale of them all
    scales_sums = False  # of a group's inputs, in place of factors; then of_group's result begins with the scales
    unrolled, asked_lines = 4, 2  # steps, and what each asks for, of four lines at most: two turns ask for all
    turn_rows = TURN_ROWS  # at most

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        """What becomes of what lies at these addresses, once for the inputs that share it."""

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        """Vectors of the factors at an address, each for 4 bytes of a row: made when it is asked for, as registers are
        few. line_bytes: from a panel's line to the next."""
        yield load(builder, address, FLOATS, self.vector_bytes)

    def add(self, builder: Any, row: Any, factors: Any, total: Any) -> Any:
        """total + what the 4 bytes at a row's address add to it."""
        return fused_multiply_add(builder, load(builder, row, FLOAT, 4), factors, total)


class Float16(Float32):
    """Rows are float32."""

    vector_bytes, widens_from = 2 * LANES, MANY_ROWS

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        yield builder.fpext(load(builder, address, HALVES, self.vector_bytes), FLOATS)


class BFloat16(Float32):
    """A step takes two inputs, whose weights share words; rows are float32."""

    row_bytes, step_inputs, widens_from = 8, 2, MANY_ROWS

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        words = load(builder, address, WORDS, self.vector_bytes)
        yield builder.bitcast(builder.shl(words, ir.Constant(WORDS, [16] * LANES)), FLOATS)
        yield builder.bitcast(builder.and_(words, ir.Constant(WORDS, [0xFFFF0000] * LANES)), FLOATS)


class BFloat16Pairs(Float32):
    """A step takes two inputs in one instruction; rows are bfloat16."""

    step_inputs = 2

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        yield load(builder, address, WORDS, self.vector_bytes)

    def add(self, builder: Any, row: Any, factors: Any, total: Any) -> Any:
        pair = every_lane(builder, load(builder, row, WORD, 4))
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, pair, factors])


class Scaled(Float32):
    """Numbers that are multiplied by the scales of their outputs first; rows are float32."""

    vector_bytes, widens_from = LANES, MANY_ROWS

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        return load(builder, scales, FLOATS, 4)


class Int8(Scaled):
    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        numbers = builder.sitofp(builder.sext(load(builder, address, BYTES, self.vector_bytes), WORDS), FLOATS)
        yield builder.fmul(numbers, of_group)


class Float8(Scaled):
    """Scales are 2**120 times what they are for the numbers (kernels/cpu/panels.py)."""

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        yield builder.fmul(bits_of_float8(builder, load(builder, address, BYTES, self.vector_bytes)), of_group)


class Codes(Scaled):
    """A step takes two inputs, whose codes of 4 bits share a byte."""

    row_bytes, step_inputs, widens_from = 8, 2, TURN_ROWS + 1

    def halves(self, builder: Any, address: Any, kind: Any) -> Iterator[Any]:
        """The codes of either input, as elements of a kind of vector."""
        codes = load(builder, address, BYTES, self.vector_bytes)
        codes = codes if kind == BYTES else builder.zext(codes, kind)
        yield builder.and_(codes, ir.Constant(kind, [15] * LANES))
        yield builder.lshr(codes, ir.Constant(kind, [4] * LANES))


class Int4(Codes):
    """Scale times zero point is exact, so code * scale less that is rounded once, as scale * (code - zero point) is."""

    widens_from = TURN_ROWS + 3

    def __init__(self, *, has_zeros: bool) -> None:
        self.has_zeros = has_zeros

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        own = load(builder, scales, FLOATS, 4)
        points = load(builder, zeros, FLOATS, 4) if self.has_zeros else ir.Constant(FLOATS, [float(ZERO)] * LANES)
        return own, builder.fneg(builder.fmul(own, points))

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        for codes in self.halves(builder, address, WORDS):
            yield call_llvm(builder, FUSED, FLOATS, [builder.sitofp(codes, FLOATS), *of_group])


class Fp4(Codes):
    has_blocks = True

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        return scales_of_block(builder, scales, block_scales)

    def weights(self, builder: Any, address: Any, line_bytes: int, of_group: Any) -> Iterator[Any]:
        for codes in self.halves(builder, address, BYTES):
            found = builder.sext(look_up(builder, FP4_NUMBERS, codes), WORDS)
            yield builder.fmul(builder.sitofp(found, FLOATS), of_group)


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


def bits_of_float8(builder: Any, octets: Any) -> Any:
    """2**-120 times the numbers.

    Exponent and mantissa move to the places that a float32 has them at, where also those below the smallest normal
    number mean what they did.
    """
    moved = builder.shl(builder.sext(octets, WORDS), ir.Constant(WORDS, [20] * LANES))
    return builder.bitcast(builder.and_(moved, ir.Constant(WORDS, [0x87F00000] * LANES)), FLOATS)


def scales_of_block(builder: Any, scales: Any, block_scales: Any) -> Any:
    """A group's scales, as kernels.quantized_weight.block_scales_of has them, times those of its outputs."""
    words = builder.zext(load(builder, block_scales, BYTES, 1), WORDS)
    moved = builder.shl(words, ir.Constant(WORDS, [20] * LANES))
    found = builder.bitcast(builder.add(moved, ir.Constant(WORDS, [97 << 23] * LANES)), FLOATS)
    return builder.fmul(load(builder, scales, FLOATS, 4), found)


def look_up(builder: Any, table: tuple[int, ...], places: Any) -> Any:
    """The numbers of a table of 16, at LANES bytes below that."""
    name = "llvm.aarch64.neon.tbl1.v16i8" if is_arm() else "llvm.x86.ssse3.pshuf.b.128"
    return call_llvm(builder, name, BYTES, [ir.Constant(BYTES, list(table)), places])


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
