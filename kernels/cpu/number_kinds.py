"""What the numbers of a panel's weights become, in vector lanes, before rows are multiplied by them."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir

from kernels.cpu.native import call_llvm
from kernels.cpu.panels import LANES, is_arm, multiplies_pairs
from kernels.quantized_weight import FLOAT8, FP4_NUMBERS, ZERO, Code

INT, WORD, BYTE, FLOAT, HALF = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType(), ir.HalfType()
FLOATS, WORDS, BYTES, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, WORD, BYTE, HALF))
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
    # As many rows, then float32, as are faster where float32 factors are made once and not in each turn.
    widens_from = NEVER
    has_zeros = False  # zero points behind the scales
    has_blocks = False  # block scales, one for each group, and one scale of them all

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        """What becomes of what lies at these addresses, once for the inputs that share it."""

    def weights(self, builder: Any, address: Any, of_group: Any) -> list[Any]:
        """Vectors of the factors at an address, one for each of a step's inputs."""
        return [load(builder, address, FLOATS, self.vector_bytes)]

    def add(self, builder: Any, row: Any, weights: list[Any], total: Any) -> Any:
        """total + what the step's inputs at a row's address add to it."""
        for index, factors in enumerate(weights):
            factor = load(builder, builder.add(row, number(4 * index)), FLOAT, 4)
            total = fused_multiply_add(builder, factor, factors, total)
        return total


class Float16(Float32):
    """Rows are float32."""

    vector_bytes, widens_from = 2 * LANES, MANY_ROWS

    def weights(self, builder: Any, address: Any, _of_group: Any) -> list[Any]:
        return [builder.fpext(load(builder, address, HALVES, self.vector_bytes), FLOATS)]


class BFloat16(Float32):
    """A step takes two inputs, whose weights share words; rows are float32."""

    row_bytes, step_inputs, widens_from = 8, 2, MANY_ROWS

    def weights(self, builder: Any, address: Any, _of_group: Any) -> list[Any]:
        words = load(builder, address, WORDS, self.vector_bytes)
        low, high = ir.Constant(WORDS, [16] * LANES), ir.Constant(WORDS, [0xFFFF0000] * LANES)
        return [builder.bitcast(word, FLOATS) for word in (builder.shl(words, low), builder.and_(words, high))]


class BFloat16Pairs(Float32):
    """A step takes two inputs in one instruction; rows are bfloat16."""

    step_inputs = 2

    def weights(self, builder: Any, address: Any, _of_group: Any) -> list[Any]:
        return [load(builder, address, WORDS, self.vector_bytes)]

    def add(self, builder: Any, row: Any, weights: list[Any], total: Any) -> Any:
        pair = every_lane(builder, load(builder, row, WORD, 4))
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, pair, *weights])


class Scaled(Float32):
    """Numbers that are multiplied by the scales of their outputs first; rows are float32."""

    vector_bytes, widens_from = LANES, MANY_ROWS

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        return load(builder, scales, FLOATS, 4)


class Int8(Scaled):
    def weights(self, builder: Any, address: Any, of_group: Any) -> list[Any]:
        numbers = builder.sitofp(builder.sext(load(builder, address, BYTES, self.vector_bytes), WORDS), FLOATS)
        return [builder.fmul(numbers, of_group)]


class Float8(Scaled):
    """Scales are 2**120 times what they are for the numbers (kernels/cpu/panels.py).

    Exponent and mantissa move to the places that a float32 has them at, where also those below the smallest normal
    number mean what they did, 2**-120 times.
    """

    def weights(self, builder: Any, address: Any, of_group: Any) -> list[Any]:
        words = builder.sext(load(builder, address, BYTES, self.vector_bytes), WORDS)
        moved = builder.shl(words, ir.Constant(WORDS, [20] * LANES))
        numbers = builder.bitcast(builder.and_(moved, ir.Constant(WORDS, [0x87F00000] * LANES)), FLOATS)
        return [builder.fmul(numbers, of_group)]


class Codes(Scaled):
    """A step takes two inputs, whose codes of 4 bits share a byte."""

    row_bytes, step_inputs, widens_from = 8, 2, TURN_ROWS + 1

    def halves(self, builder: Any, address: Any, kind: Any) -> list[Any]:
        """The codes of either input, as elements of a kind of vector."""
        codes = load(builder, address, BYTES, self.vector_bytes)
        codes = codes if kind == BYTES else builder.zext(codes, kind)
        low, four = ir.Constant(kind, [15] * LANES), ir.Constant(kind, [4] * LANES)
        return [builder.and_(codes, low), builder.lshr(codes, four)]


class Int4(Codes):
    """Scale times zero point is exact, so code * scale less that is rounded once, as scale * (code - zero point) is."""

    widens_from = TURN_ROWS + 3

    def __init__(self, *, has_zeros: bool) -> None:
        self.has_zeros = has_zeros

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        own = load(builder, scales, FLOATS, 4)
        points = load(builder, zeros, FLOATS, 4) if self.has_zeros else ir.Constant(FLOATS, [float(ZERO)] * LANES)
        return own, builder.fneg(builder.fmul(own, points))

    def weights(self, builder: Any, address: Any, of_group: Any) -> list[Any]:
        return [
            call_llvm(builder, FUSED, FLOATS, [builder.sitofp(codes, FLOATS), *of_group])
            for codes in self.halves(builder, address, WORDS)
        ]


class Fp4(Codes):
    has_blocks = True

    def of_group(self, builder: Any, scales: Any, zeros: Any, block_scales: Any) -> Any:
        """As kernels.quantized_weight.block_scales_of."""
        words = builder.zext(load(builder, block_scales, BYTES, 1), WORDS)
        moved = builder.shl(words, ir.Constant(WORDS, [20] * LANES))
        found = builder.bitcast(builder.add(moved, ir.Constant(WORDS, [97 << 23] * LANES)), FLOATS)
        return builder.fmul(load(builder, scales, FLOATS, 4), found)

    def weights(self, builder: Any, address: Any, of_group: Any) -> list[Any]:
        found = [look_up(builder, FP4_NUMBERS, codes) for codes in self.halves(builder, address, BYTES)]
        return [builder.fmul(builder.sitofp(builder.sext(own, WORDS), FLOATS), of_group) for own in found]


def look_up(builder: Any, table: tuple[int, ...], places: Any) -> Any:
    """The numbers of a table of 16, at LANES bytes below that."""
    name = "llvm.aarch64.neon.tbl1.v16i8" if is_arm() else "llvm.x86.ssse3.pshuf.b.128"
    return call_llvm(builder, name, BYTES, [ir.Constant(BYTES, list(table)), places])


KINDS: tuple[Float32, ...] = (
    *(Float32(), Float16(), BFloat16(), BFloat16Pairs(), Int8(), Float8()),
    *(Int4(has_zeros=False), Int4(has_zeros=True), Fp4()),
)


OF_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.int8: 4, FLOAT8: 5}
OF_CODES = {("int4", False): 6, ("int4", True): 7, ("fp4", False): 8}  # and whether they have zero points


def kind_of(numbers: torch.dtype) -> int:
    """Of numbers of this type, on this machine: an index of KINDS."""
    return 2 + multiplies_pairs() if numbers == torch.bfloat16 else OF_NUMBERS[numbers]


def kind_of_codes(code: Code, *, has_zeros: bool) -> int:
    return OF_CODES[code, has_zeros]
