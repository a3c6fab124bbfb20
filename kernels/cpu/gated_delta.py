"""kernels/reference/gated_delta.py, a request's head at a time; a token walks once over the memory, row by row.

A thread that computes drafts works on them in memory of its own: the state's keeps what is certain.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.bits import float_of_bits
from kernels.cpu.compiled import vectorized
from kernels.cpu.convolution import add_tap, begin_with
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2
from kernels.cpu.kernel import Kernel, arguments_of, bits_of
from kernels.cpu.native import NUM_BYTES, floats, integers
from kernels.cpu.recording import empty
from kernels.cpu.softplus import softplus
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference import gated_delta as reference
from kernels.reference.gated_delta import DeltaHeads, DeltaRows, DeltaStates, DeltaWeights

NOTHING, ONE = np.float32(0.0), np.float32(1.0)
LENGTH_EPS = np.float32(reference.LENGTH_EPS)
Arguments = arguments_of(
    *("out", "mixed", "gate", "forgotten", "written"),  # addresses, as those that follow: of a launch's rows
    *("starts", "ends", "slots", "first_rows", "counts"),  # of its segments; the last two 0: rows_each says it
    *("memory", "recent", "reached"),  # of the states
    *("convolution", "bias", "a_log", "dt_bias", "norm", "eps", "skip"),  # of the weights; 0: there is none
    "room",  # [num_threads, room_size] float32
    *("num_rows", "mixed_stride", "gate_stride", "forgotten_stride", "written_stride"),
    *("num_segments", "rows_each", "offset", "end_offset", "ring", "element_size"),
    *("num_key_heads", "num_value_heads", "key_dim", "value_dim", "taps", "row", "room_size"),
    "most_written",  # how many times as much as a sigmoid says
    *("is_bounded", "most_forgotten"),  # the latter, if it is, as the bits of a float32
)


@vectorized
def activate(numbers: Any) -> None:
    """SiLU, in place."""
    for index in range(len(numbers)):
        numbers[index] = numbers[index] / (ONE + exp2(-numbers[index] * LOG2_E))


@vectorized
def inner_product(first: Any, second: Any) -> Any:
    total = NOTHING
    for index in range(len(first)):
        total += first[index] * second[index]
    return total


@vectorized
def inverse_length(numbers: Any) -> Any:
    return ONE / np.sqrt(inner_product(numbers, numbers) + LENGTH_EPS)


@vectorized
def move_on(memory: Any, query: Any, key: Any, value: Any, kept: Any, written: Any) -> None:
    """A token's step: value [value_dim] becomes what its query finds in the memory behind it."""
    agreement = inner_product(query, key)
    for row in range(len(value)):
        own, known, found = memory[row], NOTHING, NOTHING
        for index in range(len(key)):
            known += own[index] * key[index]
            found += own[index] * query[index]
        change = (value[row] - kept * known) * written
        for index in range(len(key)):
            own[index] = kept * own[index] + change * key[index]
        value[row] = kept * found + change * agreement


@vectorized
def move_channels_on(memory: Any, query: Any, key: Any, value: Any, kept: Any, written: Any) -> None:
    """The same where each of a key's channels forgets by itself, kept [key_dim]."""
    agreement = inner_product(query, key)
    for row in range(len(value)):
        own, known, found = memory[row], NOTHING, NOTHING
        for index in range(len(key)):
            number = kept[index] * own[index]
            known += number * key[index]
            found += number * query[index]
            own[index] = number
        change = (value[row] - known) * written
        for index in range(len(key)):
            own[index] += change * key[index]
        value[row] = found + change * agreement


@vectorized
def add_on(memory: Any, query: Any, key: Any, value: Any, kept: Any, rate: Any, skip: Any) -> None:
    """The same of a state space, by which a part of the value passes."""
    agreement = inner_product(query, key)
    for row in range(len(value)):
        own, found, change = memory[row], NOTHING, value[row] * rate
        for index in range(len(key)):
            found += own[index] * query[index]
            own[index] = kept * own[index] + change * key[index]
        value[row] = kept * found + change * agreement + skip * value[row]


@vectorized
def write_gated(to: Any, found: Any, gate: Any) -> None:
    for index in range(len(found)):
        own = widen(gate[index])
        to[index] = narrow(found[index] * (own / (ONE + exp2(-own * LOG2_E))), gate[index])


@vectorized
def norm_result(found: Any, norm: Any, eps: Any) -> None:
    scale = ONE / np.sqrt(inner_product(found, found) / np.float32(len(found)) + eps)
    for index in range(len(found)):
        found[index] = found[index] * scale * norm[index]


@vectorized
def write_gated_by_sigmoid(to: Any, found: Any, gate: Any) -> None:
    for index in range(len(found)):
        to[index] = narrow(found[index] / (ONE + exp2(-widen(gate[index]) * LOG2_E)), gate[index])


@vectorized
def keep(kept: Any, forgotten: Any, bias: Any, forgets: Any) -> None:
    """What is kept of each channel, of what is said of it."""
    for index in range(len(kept)):
        kept[index] = exp2(-forgets * softplus(widen(forgotten[index]) + bias[index]) * LOG2_E)


@vectorized
def keep_at_least(kept: Any, forgotten: Any, bias: Any, forgets: Any, most: Any) -> None:
    """The same where no token makes a memory forget more."""
    for index in range(len(kept)):
        said = forgets * (widen(forgotten[index]) + bias[index])
        kept[index] = exp2(-most / (ONE + exp2(-said * LOG2_E)) * LOG2_E)


@cache
def heads_go_on(element: Any, is_state_space: bool, forgets_by_channel: bool) -> Kernel:
    """Of rows of these elements."""
    num_written = 0 if is_state_space else 1

    def go_on(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        heads, key_dim, value_dim, ring = a.num_value_heads, a.key_dim, a.value_dim, a.ring
        keys, values = a.num_key_heads * key_dim, heads * value_dim
        convolved, width, own = 2 * keys + values, a.row, 2 * key_dim + value_dim
        num_forgotten = key_dim if forgets_by_channel else 1
        to = elements(a.out, a.num_rows, values, element)
        mixed = elements(a.mixed, a.num_rows, a.mixed_stride, element)
        gates = elements(a.gate, a.num_rows, a.gate_stride, element)
        forgotten = elements(a.forgotten, a.num_rows, a.forgotten_stride, element)
        written = elements(a.written if a.written else a.mixed, a.num_rows, a.written_stride, element)
        taps = elements(a.convolution, a.taps, convolved, element)
        a_log, dt_bias = floats(a.a_log, 1, heads)[0], floats(a.dt_bias, 1, heads * num_forgotten)[0]
        biases = elements(a.bias if a.bias else a.convolution, 1, convolved, element)[0]
        norm = floats(a.norm if a.norm else a.a_log, 1, value_dim)[0]  # without one: nobody reads it
        starts, ends = integers(a.starts, a.num_segments), integers(a.ends, a.num_segments)
        slots = integers(a.slots, a.num_segments)
        first_rows = integers(a.first_rows if a.first_rows else a.starts, a.num_segments)
        counts = integers(a.counts if a.counts else a.starts, a.num_segments)
        own_room = a.room + NUM_BYTES * a.room_size * thread
        room, own_memory = floats(own_room, 1, own)[0], floats(own_room + NUM_BYTES * own, value_dim, key_dim)
        query, key, value = room[:key_dim], room[key_dim : 2 * key_dim], room[2 * key_dim :]
        kept = floats(own_room + NUM_BYTES * (own + value_dim * key_dim), 1, num_forgotten)[0]
        for unit in range(part, a.num_segments * heads, num_parts):
            segment, head = unit // heads, unit % heads
            first, count = segment * a.rows_each, a.rows_each
            if a.counts:
                first, count = first_rows[segment], counts[segment]
            slot, start = slots[segment], max(starts[segment] + a.offset, 0)
            if slot == 0:
                for row in range(first, first + count):
                    nothing = to[row, head * value_dim : (head + 1) * value_dim]
                    for index in range(value_dim):
                        nothing[index] = narrow(NOTHING, nothing[index])
                continue
            if count == 0:
                continue
            stop, at = start + count, slot * heads + head
            memory = floats(a.memory + NUM_BYTES * at * key_dim * value_dim, value_dim, key_dim)
            recent = elements(a.recent + a.element_size * at * ring * width, ring, width, element)
            reached = integers(a.reached + 8 * at, 1)
            begin = min(max(reached[0], start - (ring - a.taps + 1)), start) if start > 0 else 0
            certain = min(max(ends[segment] + a.end_offset, begin), stop)
            current = memory
            if start == 0:
                for row in range(value_dim):
                    for index in range(key_dim):
                        memory[row, index] = NOTHING
            shared = head // (heads // a.num_key_heads)
            of_query, of_key = shared * key_dim, keys + shared * key_dim
            of_value = 2 * keys + head * value_dim
            for position in range(begin, stop):
                if position == certain:
                    for row in range(value_dim):
                        for index in range(key_dim):
                            own_memory[row, index] = memory[row, index]
                    current = own_memory
                if a.bias:
                    begin_with(query, biases, of_query)
                    begin_with(key, biases, of_key)
                    begin_with(value, biases, of_value)
                else:
                    for index in range(own):
                        room[index] = NOTHING
                for tap in range(a.taps):
                    place = position - a.taps + 1 + tap
                    if place >= start:
                        row = mixed[first + place - start]
                        add_tap(query, row, of_query, taps[tap], of_query)
                        add_tap(key, row, of_key, taps[tap], of_key)
                        add_tap(value, row, of_value, taps[tap], of_value)
                    elif place >= 0:
                        row = recent[place % ring]
                        add_tap(query, row, 0, taps[tap], of_query)
                        add_tap(key, row, key_dim, taps[tap], of_key)
                        add_tap(value, row, 2 * key_dim, taps[tap], of_value)
                activate(room)
                if position >= start:
                    place = first + position - start
                    share = widen(written[place, head])
                    said = forgotten[place, head * num_forgotten : (head + 1) * num_forgotten]
                else:
                    row = recent[position % ring]
                    share, said = widen(row[own]), row[own + num_written : own + num_written + num_forgotten]
                bias, forgets = dt_bias[head * num_forgotten : (head + 1) * num_forgotten], exp2(a_log[head] * LOG2_E)
                if a.is_bounded:
                    keep_at_least(kept, said, bias, forgets, float_of_bits(np.int32(a.most_forgotten)))
                else:
                    keep(kept, said, bias, forgets)
                if is_state_space:
                    rate, skip = softplus(widen(said[0]) + bias[0]), floats(a.skip, 1, heads)[0, head]
                    add_on(current, query, key, value, kept[0], rate, skip)
                else:
                    query_scale = inverse_length(query) / np.sqrt(np.float32(key_dim))
                    key_scale = inverse_length(key)
                    for index in range(key_dim):
                        query[index] *= query_scale
                        key[index] *= key_scale
                    share = np.float32(a.most_written) / (ONE + exp2(-share * LOG2_E))
                    if forgets_by_channel:
                        move_channels_on(current, query, key, value, kept, share)
                    else:
                        move_on(current, query, key, value, kept[0], share)
                if position >= start:
                    place = first + position - start
                    result = to[place, head * value_dim : (head + 1) * value_dim]
                    gate = gates[place, head * value_dim : (head + 1) * value_dim]
                    if not is_state_space:
                        norm_result(value, norm, floats(a.eps, 1, 1)[0, 0])
                    if forgets_by_channel:
                        write_gated_by_sigmoid(result, value, gate)
                    else:
                        write_gated(result, value, gate)
            reached[0] = certain
            for position in range(max(start, stop - ring), stop):
                kept_row, place = recent[position % ring], first + position - start
                row = mixed[place]
                for index in range(key_dim):
                    kept_row[index] = row[of_query + index]
                    kept_row[key_dim + index] = row[of_key + index]
                for index in range(value_dim):
                    kept_row[2 * key_dim + index] = row[of_value + index]
                if num_written:
                    kept_row[own] = written[place, head]
                for index in range(num_forgotten):
                    kept_row[own + num_written + index] = forgotten[place, head * num_forgotten + index]

    return Kernel(go_on, Arguments)


def gated_delta(
    rows: DeltaRows, segments: RecurrentSegments, states: DeltaStates, weights: DeltaWeights, heads: DeltaHeads
) -> Tensor:
    """As the reference, but rows of no segment hold whatever was there."""
    num_rows, num_segments, dtype = len(rows.mixed), len(segments.starts), rows.mixed.dtype
    ring, threads = states.recent.shape[2], torch.get_num_threads()
    places, written = (segments.first_rows, segments.counts), rows.written
    for numbers in (segments.starts, segments.ends, segments.slots, *(own for own in places if own is not None)):
        assert numbers.dtype == torch.int64 and numbers.shape == (num_segments,) and numbers.stride(0) == 1
    rows.require(heads)
    for own in (weights.convolution, states.recent):
        assert own.dtype == dtype and own.stride(-1) == 1
    assert states.memory.is_contiguous() and states.recent.is_contiguous() and weights.convolution.is_contiguous()
    assert weights.bias is None or (weights.bias.dtype == dtype and weights.bias.is_contiguous())
    of_weights = (weights.a_log, weights.dt_bias, weights.norm, weights.eps, weights.skip)
    assert [own is None for own in of_weights[2:]] == [
        heads.is_state_space,
        heads.is_state_space,
        not heads.is_state_space,
    ]
    for own in (states.memory, *(own for own in of_weights if own is not None)):
        assert own.dtype == torch.float32 and own.is_contiguous()
    out = empty(num_rows, heads.values, dtype=dtype)
    room_size = heads.own + heads.key_dim * heads.value_dim + heads.forgotten
    room = empty(threads, room_size)
    units = num_segments * heads.num_value_heads
    heads_go_on(ELEMENTS[dtype], heads.is_state_space, heads.forgets_by_channel)(
        *(own.data_ptr() for own in (out, rows.mixed, rows.gate, rows.forgotten)),
        0 if written is None else written.data_ptr(),
        *(own.data_ptr() for own in (segments.starts, segments.ends, segments.slots)),
        *(0 if own is None else own.data_ptr() for own in places),
        *(own.data_ptr() for own in (states.memory, states.recent, states.reached)),
        *(0 if own is None else own.data_ptr() for own in (weights.convolution, weights.bias, *of_weights)),
        room.data_ptr(),
        *(num_rows, rows.mixed.stride(0), rows.gate.stride(0), rows.forgotten.stride(0)),
        rows.mixed.stride(0) if written is None else written.stride(0),
        *(num_segments, segments.num_rows or 0, segments.offset, segments.end_offset, ring, out.element_size()),
        *(heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim, heads.taps, heads.row, room_size),
        2 if heads.writes_twice else 1,
        *(heads.most_forgotten is not None, bits_of(heads.most_forgotten or 0.0)),
        parts=max(1, min(4 * threads, units)) if threads > 1 else 1,
    )
    return out
