"""kernels/reference/short_conv.py, columns of a request at a time: a product lies in the ring before it is used."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import vectorized
from kernels.cpu.convolution import add_tap, begin_with
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import NUM_BYTES, floats, integers
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.short_conv import ConvStates, ConvWeights
from kernels.sizes import cdiv

NOTHING = np.float32(0.0)
CHUNK = 512  # columns that a thread computes together, at most
MIN_CHUNK = 64
PART_WORK = 1 << 12  # numbers, each of all taps, computed in some microseconds
Arguments = arguments_of(
    *("out", "mixed"),  # addresses, as those that follow: of a launch's rows
    *("starts", "slots", "first_rows", "counts"),  # of its segments; the last two 0: rows_each says it
    *("recent", "convolution", "bias"),  # bias 0: there is none
    "room",  # [num_threads, CHUNK] float32
    *("num_rows", "mixed_stride", "num_segments", "num_slots", "rows_each", "offset", "ring", "width", "taps"),
    "chunk",
)


@vectorized
def keep_product(kept: Any, row: Any, first: Any, width: Any, count: Any) -> None:
    """Of gates and values, which lie two widths further on."""
    kept, gate = kept[first : first + count], row[first : first + count]
    value = row[2 * width + first : 2 * width + first + count]
    for index in range(count):
        kept[index] = narrow(widen(gate[index]) * widen(value[index]), gate[index])


@vectorized
def write_gated(to: Any, sums: Any, row: Any, first: Any, width: Any, count: Any) -> None:
    to, gate = to[first : first + count], row[width + first : width + first + count]
    for index in range(count):
        to[index] = narrow(sums[index] * widen(gate[index]), gate[index])


@cache
def columns_convolving(element: Any) -> Kernel:
    """Of rows of these elements."""

    def go_on(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        width, ring = a.width, a.ring
        to = elements(a.out, a.num_rows, width, element)
        mixed = elements(a.mixed, a.num_rows, a.mixed_stride, element)
        recent = elements(a.recent, a.num_slots * ring, width, element)
        taps = elements(a.convolution, a.taps, width, element)
        bias = elements(a.bias if a.bias else a.convolution, 1, width, element)[0]
        starts, slots = integers(a.starts, a.num_segments), integers(a.slots, a.num_segments)
        first_rows = integers(a.first_rows if a.first_rows else a.starts, a.num_segments)
        counts = integers(a.counts if a.counts else a.starts, a.num_segments)
        room = floats(a.room + NUM_BYTES * CHUNK * thread, 1, CHUNK)[0]
        num_chunks = (width + a.chunk - 1) // a.chunk
        for unit in range(part, a.num_segments * num_chunks, num_parts):
            segment, column = unit // num_chunks, unit % num_chunks * a.chunk
            size = min(a.chunk, width - column)
            sums = room[:size]
            first, count = segment * a.rows_each, a.rows_each
            if a.counts:
                first, count = first_rows[segment], counts[segment]
            slot, start = slots[segment], max(starts[segment] + a.offset, 0)
            if slot == 0:
                for row in range(first, first + count):
                    for index in range(column, column + size):
                        to[row, index] = narrow(NOTHING, to[row, index])
                continue
            for position in range(start, start + count):
                place = first + position - start
                row = mixed[place]
                keep_product(recent[slot * ring + position % ring], row, column, width, size)
                if a.bias:
                    begin_with(sums, bias, column)
                else:
                    for index in range(size):
                        sums[index] = NOTHING
                for tap in range(max(a.taps - 1 - position, 0), a.taps):
                    seen = position - a.taps + 1 + tap
                    add_tap(sums, recent[slot * ring + seen % ring], column, taps[tap], column)
                write_gated(to[place], sums, row, column, width, size)

    return Kernel(go_on, Arguments)


def short_conv(mixed: Tensor, segments: RecurrentSegments, states: ConvStates, weights: ConvWeights) -> Tensor:
    """As the reference, but rows of no segment hold whatever was there."""
    num_rows, num_segments, (taps, width) = len(mixed), len(segments.starts), weights.convolution.shape
    (num_slots, ring, _), threads = states.recent.shape, torch.get_num_threads()
    rows = (segments.first_rows, segments.counts)
    for numbers in (segments.starts, segments.slots, *(own for own in rows if own is not None)):
        assert numbers.dtype == torch.int64 and numbers.shape == (num_segments,) and numbers.stride(0) == 1
    assert mixed.shape[1] == 3 * width and mixed.stride(1) == 1 and states.recent.shape[2] == width and ring >= taps
    for own in (states.recent, weights.convolution, *(() if weights.bias is None else (weights.bias,))):
        assert own.dtype == mixed.dtype and own.is_contiguous()
    out, room = empty(num_rows, width, dtype=mixed.dtype), empty(threads, CHUNK)
    parts = parts_of(num_rows * width, PART_WORK, num_segments * cdiv(width, MIN_CHUNK))
    chunk = min(cdiv(num_segments * width, parts * MIN_CHUNK) * MIN_CHUNK, CHUNK)  # each part has one
    columns_convolving(ELEMENTS[mixed.dtype])(
        *(own.data_ptr() for own in (out, mixed, segments.starts, segments.slots)),
        *(0 if own is None else own.data_ptr() for own in rows),
        *(states.recent.data_ptr(), weights.convolution.data_ptr()),
        0 if weights.bias is None else weights.bias.data_ptr(),
        room.data_ptr(),
        *(num_rows, mixed.stride(0), num_segments, num_slots, segments.num_rows or 0, segments.offset),
        *(ring, width, taps, chunk),
        parts=parts,
    )
    return out
