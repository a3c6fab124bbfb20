"""Sums of products in vector lanes, as LLVM writes them: what products of weights are made of, and attention.

A lane adds up one output of one row, from the first input to the last, by fused multiply-adds (bfloat16: by AVX-512's
instruction for pairs, where there is one). How many rows and outputs a call computes changes nothing of that. A matrix
unit takes over products of bfloat16 where there is one (kernels/cpu/amx.py).
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.native import CACHE_LINE, SECOND_CACHE, call_llvm, prefetch
from kernels.cpu.panels import LANES, is_arm, multiplies_pairs
from kernels.quantized_weight import FLOAT8, FP4_NUMBERS, ZERO, Code

INT, WORD, BYTE, FLOAT, HALF = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType(), ir.HalfType()
FLOATS, WORDS, BYTES, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, WORD, BYTE, HALF))
TURN_ROWS = 6  # that share a panel's registers
FUSED = f"llvm.fma.v{LANES}f32"
MANY_ROWS, NEVER = 3 * TURN_ROWS + 1, 1 << 30
UNROLLED = 4  # steps
ASKED_LINES = 2  # that a step asks for, of four at most: two turns ask for all

Ahead = tuple[Any, Any]  # what is asked for at the first step, and bytes from step to step


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

    def of_group(self, builder: Any, scales: Any, zeros: Any) -> Any:
        """What becomes of scales and zero points at these addresses, once for the inputs that share them."""

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

    def of_group(self, builder: Any, scales: Any, zeros: Any) -> Any:
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

    def of_group(self, builder: Any, scales: Any, zeros: Any) -> Any:
        own = load(builder, scales, FLOATS, 4)
        points = load(builder, zeros, FLOATS, 4) if self.has_zeros else ir.Constant(FLOATS, [float(ZERO)] * LANES)
        return own, builder.fneg(builder.fmul(own, points))

    def weights(self, builder: Any, address: Any, of_group: Any) -> list[Any]:
        return [
            call_llvm(builder, FUSED, FLOATS, [builder.sitofp(codes, FLOATS), *of_group])
            for codes in self.halves(builder, address, WORDS)
        ]


class Fp4(Codes):
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


def kind_of(numbers: torch.dtype) -> int:
    """Of numbers of this type, on this machine: an index of KINDS."""
    if numbers == torch.bfloat16:
        return 3 if multiplies_pairs() else 2
    return {torch.float32: 0, torch.float16: 1, torch.int8: 4, FLOAT8: 5}[numbers]


def kind_of_codes(code: Code, *, has_zeros: bool) -> int:
    return {("int4", False): 6, ("int4", True): 7, ("fp4", False): 8}[code, has_zeros]


class Sums:
    """num_rows times num_vectors vectors of sums on their way, and the instructions that move them on."""

    def __init__(self, builder: Any, kind: Float32, num_rows: int, num_vectors: int) -> None:
        self.builder, self.kind = builder, kind
        self.rows, self.vectors = range(num_rows), range(num_vectors)
        self.totals: list[Any] = []
        self.of_groups: list[Any] = []

    def scale(self, scales: Any) -> None:
        """With the scales at an address, one for each output, and zero points behind them."""
        add, width = self.builder.add, 4 * LANES * len(self.vectors)
        places = [add(scales, number(4 * LANES * vector)) for vector in self.vectors]
        self.of_groups = [self.kind.of_group(self.builder, place, add(place, number(width))) for place in places]

    def places(self, address: Any, stride: Any) -> list[Any]:
        add, mul = self.builder.add, self.builder.mul
        lines = [add(address, mul(stride, number(row))) for row in self.rows]
        return [add(line, number(4 * LANES * vector)) for line in lines for vector in self.vectors]

    def start(self, address: Any, stride: Any) -> None:
        self.totals = [load(self.builder, place, FLOATS, 4) for place in self.places(address, stride)]

    def store(self, address: Any, stride: Any) -> None:
        for place, total in zip(self.places(address, stride), self.totals, strict=True):
            self.builder.store(total, self.builder.inttoptr(place, FLOATS.as_pointer())).align = 4

    def steps(self, first: Any, end: Any, length: int, bases: list[Any], panel: Any, ahead: Ahead | None) -> Any:
        """A loop over steps from first up to end, `length` at a time; how far it came."""
        builder, before = self.builder, self.builder.block
        body, behind = builder.append_basic_block("steps"), builder.append_basic_block("behind")
        builder.cbranch(builder.icmp_signed(">", builder.add(first, number(length)), end), behind, body)
        builder.position_at_end(body)
        step, *sums = places = [builder.phi(INT), *(builder.phi(FLOATS) for _ in self.totals)]
        current = list(sums)
        step_bytes = self.kind.vector_bytes * len(self.vectors)
        for index in range(length):
            begins_line = index * step_bytes % CACHE_LINE < step_bytes  # what others ask for was asked for
            self._step(builder.add(step, number(index)), bases, panel, ahead if begins_line else None, current)
        started, reached = [first, *self.totals], [builder.add(step, number(length)), *current]
        builder.cbranch(builder.icmp_signed("<=", builder.add(reached[0], number(length)), end), body, behind)
        builder.position_at_end(behind)
        ends = [builder.phi(place.type) for place in places]
        for phi, early, late in zip((*places, *ends), started * 2, reached * 2, strict=True):
            phi.add_incoming(early, before)
            phi.add_incoming(late, body)
        self.totals = ends[1:]
        return ends[0]

    def _step(self, step: Any, bases: list[Any], panel: Any, ahead: Ahead | None, current: list[Any]) -> None:
        builder, kind, count = self.builder, self.kind, len(self.vectors)
        line = builder.add(panel, builder.mul(step, number(kind.vector_bytes * count)))
        places = [builder.add(line, number(kind.vector_bytes * at)) for at in self.vectors]
        factors = [kind.weights(builder, *place) for place in zip(places, self.of_groups, strict=True)]
        if ahead:
            wanted = builder.add(ahead[0], builder.mul(step, ahead[1]))
            # Not the first cache: it has so few misses under way that those who ask would wait for them.
            for distance in range(0, min(ASKED_LINES * CACHE_LINE, kind.vector_bytes * count), CACHE_LINE):
                prefetch(builder, builder.add(wanted, number(distance)), SECOND_CACHE)
        for row in self.rows:
            inputs = builder.add(bases[row], builder.mul(step, number(kind.row_bytes)))
            for vector in self.vectors:
                at = row * count + vector
                current[at] = kind.add(builder, inputs, factors[vector], current[at])


def _add_products(
    _context: Any,
    kind: Any,  # an index of KINDS; a constant, as the next
    num_vectors: Any,
    num_rows: Any,  # 1 to TURN_ROWS
    steps: Any,
    out: Any,  # an address, as the next two, and bytes from row to row
    out_bytes: Any,
    start: Any,
    start_bytes: Any,
    rows: Any,
    row_bytes: Any,
    panel: Any,  # its address
    scales: Any,  # address of the panel's scales, of kinds that have them
    ahead: Any,  # address of what the second cache is asked for meanwhile; a constant 0: nothing
    ahead_bytes: Any,  # from step to step
) -> Any:
    """out[row] = start[row] + the products of the row with a panel of LANES * num_vectors outputs, float32."""
    asks = not isinstance(ahead, types.IntegerLiteral)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        num_rows, steps, out, out_bytes, start, start_bytes, rows, row_bytes, panel, scales, *wanted = arguments[2:]
        ahead = (wanted[0], wanted[1]) if asks else None
        behind = builder.append_basic_block("added")
        cases = [builder.append_basic_block("rows") for _ in range(TURN_ROWS)]
        switch = builder.switch(num_rows, cases[-1])
        for count, case in enumerate(cases, start=1):
            switch.add_case(number(count), case)
            builder.position_at_end(case)
            sums = Sums(builder, KINDS[kind.literal_value], count, num_vectors.literal_value)
            bases = [builder.add(rows, builder.mul(row_bytes, number(row))) for row in sums.rows]
            sums.start(start, start_bytes)
            sums.scale(scales)
            reached = sums.steps(number(0), steps, UNROLLED, bases, panel, ahead)
            sums.steps(reached, steps, 1, bases, panel, ahead)
            sums.store(out, out_bytes)
            builder.branch(behind)
        builder.position_at_end(behind)
        return context.get_dummy_value()

    return types.void(kind, num_vectors, *[types.int64] * 10, ahead, types.int64), generate


def _widen(
    _context: Any,
    kind: Any,  # a constant, as the next
    num_vectors: Any,
    out: Any,  # addresses, as the next two
    step: Any,
    scales: Any,
) -> Any:
    """The factors of a panel's step, as a panel of float32 has them, input by input."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        own, (out, step, scales) = KINDS[kind.literal_value], arguments[2:]
        panel = Sums(builder, own, 0, num_vectors.literal_value)
        panel.scale(scales)
        line = 4 * LANES * num_vectors.literal_value
        for vector, of_group in enumerate(panel.of_groups):
            place = builder.add(step, number(own.vector_bytes * vector))
            for index, factors in enumerate(own.weights(builder, place, of_group)):
                to = builder.add(out, number(line * index + 4 * LANES * vector))
                builder.store(factors, builder.inttoptr(to, FLOATS.as_pointer())).align = 4 * LANES
        return context.get_dummy_value()

    return types.void(kind, num_vectors, *[types.int64] * 3), generate


add_products: Any = intrinsic(prefer_literal=True)(_add_products)
widen: Any = intrinsic(prefer_literal=True)(_widen)
