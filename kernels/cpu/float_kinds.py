"""What the numbers of a dense weight's panels become, in vector lanes, before rows are multiplied by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from kernels.cpu.native import call_llvm
from kernels.cpu.panels import LANES
from kernels.cpu.vectors import FLOAT, FLOATS, HALVES, WORD, WORDS, every_lane, fused_multiply_add, load

TURN_ROWS = 6  # that share a panel's registers
MANY_ROWS, NEVER = 3 * TURN_ROWS + 1, 1 << 30


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
