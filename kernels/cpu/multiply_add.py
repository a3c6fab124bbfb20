"""Sums of products in vector lanes, as LLVM writes them: what products of weights are made of, and attention.

A lane adds up one output of one row, from the first input to the last, by fused multiply-adds (bfloat16: by AVX-512's
instruction for pairs, where there is one, and so quantized numbers, whose scales meet the sums). How many rows and
outputs a call computes changes nothing of that. A matrix unit takes over products of bfloat16 where there is one
(kernels/cpu/amx.py).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.float_kinds import TURN_ROWS, Float32
from kernels.cpu.native import CACHE_LINE, SECOND_CACHE, call_llvm, prefetch
from kernels.cpu.number_kinds import KINDS
from kernels.cpu.panels import LANES
from kernels.cpu.vectors import FLOATS, FUSED, INT, load, number

Ahead = tuple[Any, Any]  # what is asked for at the first step, and bytes from step to step


class Sums:
    """num_rows times num_vectors vectors of sums on their way, and the instructions that move them on."""

    def __init__(self, builder: Any, kind: Float32, num_rows: int, num_vectors: int) -> None:
        self.builder, self.kind = builder, kind
        self.rows, self.vectors = range(num_rows), range(num_vectors)
        self.totals: list[Any] = []
        self.of_groups: list[Any] = []

    def scale(self, scales: Any, block_scales: Any) -> None:
        """With the scales at an address, one for each output, and zero points behind them; with those of a block."""
        add, width = self.builder.add, 4 * LANES * len(self.vectors)
        for vector in self.vectors:
            place, block = add(scales, number(4 * LANES * vector)), add(block_scales, number(LANES * vector))
            self.of_groups.append(self.kind.of_group(self.builder, place, add(place, number(width)), block))

    def places(self, address: Any, stride: Any) -> list[Any]:
        add, mul = self.builder.add, self.builder.mul
        lines = [add(address, mul(stride, number(row))) for row in self.rows]
        return [add(line, number(4 * LANES * vector)) for line in lines for vector in self.vectors]

    def start(self, address: Any, stride: Any) -> None:
        if self.kind.scales_sums:
            self.totals = [ir.Constant(FLOATS, [0.0] * LANES)] * len(self.places(address, stride))
        else:
            self.totals = [load(self.builder, place, FLOATS, 4) for place in self.places(address, stride)]

    def end(self, address: Any, stride: Any) -> None:
        """Where it is they that are scaled: they are added to what others start with."""
        if self.kind.scales_sums:
            for index, place in enumerate(self.places(address, stride)):
                scales, *_ = self.of_groups[index % len(self.vectors)]
                before = load(self.builder, place, FLOATS, 4)
                self.totals[index] = call_llvm(self.builder, FUSED, FLOATS, [self.totals[index], scales, before])

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
        step_bytes = self.kind.lines * self.kind.vector_bytes * len(self.vectors)
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
        line_bytes = kind.vector_bytes * count
        line = builder.add(panel, builder.mul(step, number(kind.lines * line_bytes)))
        factors = [
            kind.weights(builder, builder.add(line, number(kind.vector_bytes * vector)), line_bytes, of_group)
            for vector, of_group in enumerate(self.of_groups)
        ]
        if ahead:
            wanted = builder.add(ahead[0], builder.mul(step, ahead[1]))
            # Not the first cache: it has so few misses under way that those who ask would wait for them.
            for distance in range(0, min(kind.asked_lines * CACHE_LINE, kind.lines * line_bytes), CACHE_LINE):
                prefetch(builder, builder.add(wanted, number(distance)), SECOND_CACHE)
        inputs = builder.mul(step, number(kind.row_bytes))
        for part in range(kind.row_bytes // 4):
            for vector, own in enumerate(factors):
                vector_factors = next(own)
                for row in self.rows:
                    at, place = row * count + vector, builder.add(bases[row], builder.add(inputs, number(4 * part)))
                    current[at] = kind.add(builder, place, vector_factors, current[at])


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
    block_scales: Any,  # likewise
    ahead: Any,  # address of what the second cache is asked for meanwhile; a constant 0: nothing
    ahead_bytes: Any,  # from step to step
) -> Any:
    """out[row] = start[row] + the products of the row with a panel of LANES * num_vectors outputs, float32."""
    asks = not isinstance(ahead, types.IntegerLiteral)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        num_rows, steps, out, out_bytes, start, start_bytes, rows, row_bytes, panel, *own, wanted, share = arguments[2:]
        ahead = (wanted, share) if asks else None
        behind = builder.append_basic_block("added")
        cases = [builder.append_basic_block("rows") for _ in range(TURN_ROWS)]
        switch = builder.switch(num_rows, cases[-1])
        for count, case in enumerate(cases, start=1):
            switch.add_case(number(count), case)
            builder.position_at_end(case)
            sums = Sums(builder, KINDS[kind.literal_value], count, num_vectors.literal_value)
            bases = [builder.add(rows, builder.mul(row_bytes, number(row))) for row in sums.rows]
            sums.start(start, start_bytes)
            sums.scale(*own)
            reached = sums.steps(number(0), steps, sums.kind.unrolled, bases, panel, ahead)
            sums.steps(reached, steps, 1, bases, panel, ahead)
            sums.end(start, start_bytes)
            sums.store(out, out_bytes)
            builder.branch(behind)
        builder.position_at_end(behind)
        return context.get_dummy_value()

    return types.void(kind, num_vectors, *[types.int64] * 11, ahead, types.int64), generate


def _widen(
    _context: Any,
    kind: Any,  # a constant, as the next
    num_vectors: Any,
    out: Any,  # addresses, as the next two
    step: Any,
    scales: Any,
    block_scales: Any,
) -> Any:
    """The factors of a panel's step, as a panel of wide_kind has them, of float32 input by input."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        own, (out, step, *beside) = KINDS[kind.literal_value], arguments[2:]
        panel = Sums(builder, own, 0, num_vectors.literal_value)
        panel.scale(*beside)
        line = 4 * LANES * num_vectors.literal_value
        for vector, of_group in enumerate(panel.of_groups):
            place = builder.add(step, number(own.vector_bytes * vector))
            line_bytes = own.vector_bytes * num_vectors.literal_value
            for index, factors in enumerate(own.weights(builder, place, line_bytes, of_group)):
                to = builder.add(out, number(line * index + 4 * LANES * vector))
                builder.store(factors, builder.inttoptr(to, factors.type.as_pointer())).align = 4 * LANES
        return context.get_dummy_value()

    return types.void(kind, num_vectors, *[types.int64] * 4), generate


add_products: Any = intrinsic(prefer_literal=True)(_add_products)
widen: Any = intrinsic(prefer_literal=True)(_widen)
