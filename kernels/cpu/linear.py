"""y = x W^T + b from panels: a row's bits are its own, whatever number of rows, threads and vector lanes computes it.

BLAS chooses another kernel, and another order of its sums, for another number of rows. Here every output of every row
is one sum over the inputs in their order, in float32, or one of such sums of up to SCALED_INPUTS times their scales
(kernels/cpu/multiply_add.py; of bfloat16, where there is a matrix unit, kernels/cpu/linear_amx.py). Few rows read a
panel once, at the speed of memory; more take turns on parts of it that a core's own cache holds, and for many the
factors of a part are made once, not in each turn.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu import linear_amx
from kernels.cpu.elements import ELEMENTS, rows_writing
from kernels.cpu.float_kinds import TURN_ROWS, BFloat16Pairs
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.multiply_add import add_products, widen
from kernels.cpu.native import call
from kernels.cpu.number_kinds import KINDS, kind_of, kind_of_quantized, wide_kind
from kernels.cpu.panels import LANES, Panels, multiplies_pairs
from kernels.cpu.recording import empty
from kernels.cpu.rows import widened
from kernels.cpu.threads import parts_of
from kernels.quantized_weight import CODES

PART_BYTES = 1 << 16  # of a panel, for rows that take turns: it and the next one fit in any second cache
SCALED_INPUTS = 128  # whose sums are scaled at once, at most, of kinds that scale sums
AHEAD = 4096  # bytes of a panel that are asked for before they are read
PART_WORK = 1 << 17  # products, made in some microseconds; reading a weight takes as long as TURN_ROWS of them

Arguments = arguments_of(
    *("out", "bias", "x", "panels", "scales", "block_scales", "nothing", "room"),  # addresses; bias, scales 0: none
    *("num_rows", "row_bytes", "out_features", "num_panels", "panel_bytes", "steps", "group_steps"),
    *("row_step_bytes", "room_bytes"),  # room_bytes: of a thread
    *("are_float32", "write"),  # whether results are; the address of elements.rows_writing
)


@cache
def products(kind: int, vectors: int, widens: bool) -> Kernel:
    """Of a kind of number_kinds with panels of so many vectors.

    widens: a part's factors are made once; of kinds that may.
    """
    width, own = LANES * vectors, KINDS[kind]
    used, scales_sums, has_blocks = wide_kind(kind) if widens else kind, own.scales_sums, own.has_blocks
    # From group to group. Where these have blocks there is one scale of them all.
    scale_bytes, block_bytes = (0, width) if has_blocks else (4 * width * (1 + own.has_zeros), 0)
    crosses_groups = widens and not scales_sums  # factors that scales are in
    turn_rows = KINDS[used].turn_rows
    times, scaled_steps = own.step_inputs // KINDS[used].step_inputs, SCALED_INPUTS // own.step_inputs

    def multiply(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_turns = (a.num_rows + turn_rows - 1) // turn_rows
        num_groups = (a.steps + a.group_steps - 1) // a.group_steps
        row_bytes, step_bytes = a.row_bytes, a.panel_bytes // a.steps
        factors, part_steps = a.room + a.room_bytes * thread, a.steps
        room = factors + (PART_BYTES if widens else 0)
        used_bytes = 4 * width * times if widens else step_bytes
        share = (step_bytes + times * num_turns - 1) // (times * num_turns)  # of a step, that one of it asks for
        # Where sums are scaled, how many at once decides their bits: not the number of rows, which decides the parts.
        span = a.steps if crosses_groups else min(a.group_steps, scaled_steps) if scales_sums else a.group_steps
        if widens or num_turns > 1:
            part_steps = max(PART_BYTES // used_bytes, 1)
            part_steps -= part_steps % span if scales_sums else 0
        is_cut = part_steps < a.steps
        for panel in range(a.num_panels * part // num_parts, a.num_panels * (part + 1) // num_parts):
            # The last panel may have more outputs than a row of `out` has room for.
            column, columns = panel * width, min(width, a.out_features - panel * width)
            is_result = a.are_float32 and not a.bias and columns == width  # what is added up
            place, line = (a.out + 4 * column, 4 * a.out_features) if is_result else (room, 4 * width)
            scales = a.scales + (4 * width * panel if has_blocks else scale_bytes * panel * num_groups)
            blocks, begin = a.block_scales + block_bytes * panel * num_groups, 0
            while begin < a.steps:
                steps = min(part_steps, a.steps - begin)
                w = a.panels + panel * a.panel_bytes + begin * step_bytes
                if widens:
                    for step in range(steps):
                        group = (begin + step) // a.group_steps
                        s32, s8 = scales + scale_bytes * group, blocks + block_bytes * group
                        widen(kind, vectors, factors + used_bytes * step, w + step * step_bytes, s32, s8)
                for turn in range(num_turns):
                    first = a.num_rows * turn // num_turns
                    rows = a.num_rows * (turn + 1) // num_turns - first
                    out = place + (line * first if is_result or is_cut else 0)
                    # One turn asks for what it will read itself, of several each for a share of the part behind.
                    ahead = w + (AHEAD if num_turns == 1 else steps * step_bytes * (num_turns + turn) // num_turns)
                    done = 0
                    while done < steps:
                        at, group = begin + done, (begin + done) // a.group_steps
                        n = min(span - at % span, steps - done)
                        count = n * times
                        start, shift = (out, line) if at else (a.nothing, 0)
                        x, p = a.x + first * row_bytes + at * a.row_step_bytes, (factors if widens else w)
                        p, asked = p + done * used_bytes, ahead + done * times * share
                        s32, s8 = scales + scale_bytes * group, blocks + block_bytes * group
                        add_products(
                            used, vectors, rows, count, out, line, start, shift, x, row_bytes, p, s32, s8, asked, share
                        )
                        done += n
                    if begin + steps == a.steps and not is_result:
                        call(a.write, a.out, (first, column, a.out_features, a.bias, out, rows, width, columns))
                begin += steps

    return Kernel(multiply, Arguments)


NOTHING = torch.zeros(4 * LANES, device="cpu")  # what sums begin with


def linear(x: Tensor, weight: Panels, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """[num_rows, in_features] x [out_features, in_features] -> [num_rows, out_features], of x's dtype unless told."""
    out_features, in_features = weight.shape
    assert x.dtype == weight.dtype and x.shape[1] == in_features
    assert bias is None or (bias.dtype == weight.dtype and bias.is_contiguous())
    num_rows, out_dtype = len(x), out_dtype or x.dtype
    if linear_amx.multiplies_tiles(weight):
        return linear_amx.linear(x, weight, bias, out_dtype)
    out = empty(num_rows, out_features, dtype=out_dtype)
    kind = kind_of_panels(weight)
    widens = num_rows >= KINDS[kind].widens_from
    rows, room = readable(x, weight), room_of(weight, num_rows, widens=widens)
    work = (num_rows + TURN_ROWS) * out_features * in_features
    multiply = kernel_of(weight, kind, widens=widens)
    multiply(*arguments_for(rows, weight, bias, out, room), parts=parts_of(work, PART_WORK, len(weight.numbers)))
    return out


def readable(x: Tensor, weight: Panels) -> Tensor:
    """Rows [num_rows, in_features] as the kernel for a weight reads them."""
    rows = x if x.stride(1) == 1 else x.contiguous()
    takes_pairs = isinstance(KINDS[kind_of_panels(weight)], BFloat16Pairs)
    return rows if x.dtype == torch.float32 or takes_pairs else widened(rows.contiguous())


def addresses_of_scales(weight: Panels) -> list[int]:
    """And of block scales; 0: there are none."""
    return [0 if part is None else part.data_ptr() for part in (weight.scales, weight.block_scales)]


def kind_of_panels(weight: Panels) -> int:
    """An index of KINDS."""
    if weight.kind is None:
        return kind_of(weight.numbers.dtype)
    in_pairs = weight.has_words
    if weight.kind not in CODES:
        in_pairs = weight.dtype == torch.bfloat16 and multiplies_pairs() and weight.shape[1] % 2 == 0
    return kind_of_quantized(weight.kind, has_zeros=weight.has_zeros, in_pairs=in_pairs)


def room_of(weight: Panels, num_rows: int, *, widens: bool) -> Tensor:
    """For sums on their way, and for the factors of a part, of all threads."""
    num_factors = PART_BYTES // 4 if widens else 0
    return empty(torch.get_num_threads() * (num_factors + weight.width * max(num_rows, TURN_ROWS)))


def kernel_of(weight: Panels, kind: int, *, widens: bool) -> Kernel:
    """For products with such a weight, of as many rows as its kind widens from, or of fewer."""
    return products(kind, weight.width // LANES, widens)


def arguments_for(rows: Tensor, weight: Panels, bias: Tensor | None, out: Tensor, room: Tensor) -> tuple[int, ...]:
    """What the kernel takes that computes `out` of `readable` rows."""
    numbers = weight.numbers
    panel_bytes, step_inputs = numbers.stride(0) * numbers.element_size(), KINDS[kind_of_panels(weight)].step_inputs
    num_panels, steps = len(numbers), weight.shape[1] // step_inputs
    row_bytes = rows.stride(0) * rows.element_size()
    group_steps = steps if weight.scales is None else min(weight.group_size // step_inputs, steps)
    return (
        *(out.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(rows.data_ptr(), numbers.data_ptr(), *addresses_of_scales(weight)),
        *(NOTHING.data_ptr(), room.data_ptr()),
        *(len(rows), row_bytes, weight.shape[0], num_panels, panel_bytes, steps, group_steps),
        *(step_inputs * rows.element_size(), room.nbytes // torch.get_num_threads()),
        *(out.dtype == torch.float32, rows_writing(ELEMENTS[weight.dtype], ELEMENTS[out.dtype]).address),
    )
