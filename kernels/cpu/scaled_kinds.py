"""What quantized numbers become: floats, multiplied by the scales of their outputs before rows are by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from kernels.cpu.float_kinds import MANY_ROWS, TURN_ROWS, Float32
from kernels.cpu.native import call_llvm
from kernels.cpu.panels import LANES, is_arm
from kernels.cpu.vectors import BYTES, FLOATS, FUSED, WORDS, load
from kernels.quantized_weight import FP4_NUMBERS, ZERO


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
