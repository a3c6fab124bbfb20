"""kernels/reference/gated_delta.py in one launch: a program goes over a request's rows, a head's memory in registers.

A row of the memory lies along keys within a warp, so what a token reads and writes needs no other warp.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference import gated_delta as reference
from kernels.reference.gated_delta import DeltaHeads, DeltaRows, DeltaStates, DeltaWeights
from kernels.sizes import next_power_of_2
from kernels.softplus import softplus

LENGTH_EPS = tl.constexpr(reference.LENGTH_EPS)
NUM_NUMBERS = 64  # of a memory, in registers of a thread: one of 128 by 128 takes 8 warps


@triton.jit
def exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def silu(x):
    return x / (1.0 + exp(-x))


@Kernel
@triton.jit(
    do_not_specialize=["offset", "end_offset", "rows_each"],
    do_not_specialize_on_alignment=["starts_ptr", "ends_ptr", "slots_ptr", "first_rows_ptr", "counts_ptr"],
)
def gated_delta_kernel(
    out_ptr,  # [num_rows, NUM_VALUE_HEADS * VALUE_DIM]
    mixed_ptr,  # [num_rows, 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM], rows mixed_stride apart
    gate_ptr,  # [num_rows, NUM_VALUE_HEADS * VALUE_DIM], rows gate_stride apart
    forgotten_ptr,  # [num_rows, NUM_VALUE_HEADS * FORGOTTEN], rows forgotten_stride apart
    written_ptr,  # [num_rows, NUM_VALUE_HEADS], rows written_stride apart; None: of a state space
    starts_ptr,  # [num_segments] int64, as the next four
    ends_ptr,
    slots_ptr,
    first_rows_ptr,  # None, as the next: rows_each says it
    counts_ptr,
    memory_ptr,  # [num_slots, NUM_VALUE_HEADS, VALUE_DIM, KEY_DIM] float32
    recent_ptr,  # [num_slots, NUM_VALUE_HEADS, ring, ROW]
    reached_ptr,  # [num_slots, NUM_VALUE_HEADS] int64
    convolution_ptr,  # [TAPS, 2 * NUM_KEY_HEADS * KEY_DIM + NUM_VALUE_HEADS * VALUE_DIM]
    a_log_ptr,  # [NUM_VALUE_HEADS] float32
    dt_bias_ptr,  # [NUM_VALUE_HEADS * FORGOTTEN] float32
    norm_ptr,  # [VALUE_DIM] float32; None, as the next: of a state space
    eps_ptr,  # [] float32
    bias_ptr,  # as a row of the convolution, or None
    skip_ptr,  # [NUM_VALUE_HEADS] float32, of a state space
    mixed_stride,
    gate_stride,
    forgotten_stride,
    written_stride,
    rows_each,
    offset,
    end_offset,
    ring,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # >= KEY_DIM
    VALUE_BLOCK: tl.constexpr,  # >= VALUE_DIM
    TAPS: tl.constexpr,
    ROW: tl.constexpr,  # numbers that are kept of a token
    IS_STATE_SPACE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # each of a key's is forgotten by itself
    MOST_FORGOTTEN: tl.constexpr,  # or None
    WRITES_TWICE: tl.constexpr,  # as much as a sigmoid says
    OVERLAPS: tl.constexpr,  # with the launch before
):
    KEYS: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    CONVOLVED: tl.constexpr = 2 * KEYS + NUM_VALUE_HEADS * VALUE_DIM
    OWN: tl.constexpr = 2 * KEY_DIM + VALUE_DIM
    FORGOTTEN: tl.constexpr = KEY_DIM if BY_CHANNEL else 1
    WRITTEN: tl.constexpr = 0 if IS_STATE_SPACE else 1
    segment, head = tl.program_id(0), tl.program_id(1)
    key_columns, value_columns = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_key, is_value = key_columns < KEY_DIM, value_columns < VALUE_DIM
    is_element = is_value[:, None] & is_key[None, :]
    of_query = (head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)) * KEY_DIM
    of_key, of_value = KEYS + of_query, 2 * KEYS + head * VALUE_DIM
    if OVERLAPS:
        await_input()
    first, count = (segment * rows_each).to(tl.int64), rows_each.to(tl.int64)
    if counts_ptr is not None:
        first, count = tl.load(first_rows_ptr + segment), tl.load(counts_ptr + segment)
    slot = tl.load(slots_ptr + segment)
    start = tl.maximum(tl.load(starts_ptr + segment) + offset, 0)
    stop = start + count
    at = slot * NUM_VALUE_HEADS + head
    is_someones, goes_on = (slot > 0) & (count > 0), (slot > 0) & (start > 0)
    begin = tl.load(reached_ptr + at, mask=goes_on, other=0)
    begin = tl.minimum(tl.maximum(begin, start - (ring - TAPS + 1)), start)
    certain = tl.minimum(tl.maximum(tl.load(ends_ptr + segment) + end_offset, begin), stop)
    places = memory_ptr + at * (KEY_DIM * VALUE_DIM) + value_columns[:, None] * KEY_DIM + key_columns[None, :]
    memory = tl.load(places, mask=is_element & goes_on, other=0.0)
    recent_ptr += at * ring * ROW
    forgets = exp(tl.load(a_log_ptr + head))
    channels = key_columns if BY_CHANNEL else tl.arange(0, 1)
    is_channel, of_forgotten = channels < FORGOTTEN, head * FORGOTTEN + channels
    dt_bias = tl.load(dt_bias_ptr + of_forgotten, mask=is_channel, other=0.0)
    if slot == 0:
        nothing = tl.zeros([VALUE_BLOCK], tl.float32).to(out_ptr.dtype.element_ty)
        for row in range(first, first + count):
            out_row = out_ptr + row * (NUM_VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM
            tl.store(out_row + value_columns, nothing, mask=is_value)
    if is_someones == 0:
        begin = stop
    for position in range(begin, stop):
        if position == certain:
            tl.store(places, memory, mask=is_element)
        query = _bias(bias_ptr, of_query, key_columns, is_key, KEY_BLOCK)
        key = _bias(bias_ptr, of_key, key_columns, is_key, KEY_BLOCK)
        value = _bias(bias_ptr, of_value, value_columns, is_value, VALUE_BLOCK)
        for tap in tl.static_range(TAPS):
            place = position - (TAPS - 1) + tap
            is_new, is_kept = place >= start, (place < start) & (place >= 0)
            row = mixed_ptr + (first + place - start) * mixed_stride
            kept_row = recent_ptr + (tl.maximum(place, 0) % ring) * ROW
            taps = convolution_ptr + tap * CONVOLVED
            x = tl.load(row + of_query + key_columns, mask=is_key & is_new, other=0.0)
            x += tl.load(kept_row + key_columns, mask=is_key & is_kept, other=0.0)
            query += x.to(tl.float32) * tl.load(taps + of_query + key_columns, mask=is_key, other=0.0).to(tl.float32)
            x = tl.load(row + of_key + key_columns, mask=is_key & is_new, other=0.0)
            x += tl.load(kept_row + KEY_DIM + key_columns, mask=is_key & is_kept, other=0.0)
            key += x.to(tl.float32) * tl.load(taps + of_key + key_columns, mask=is_key, other=0.0).to(tl.float32)
            x = tl.load(row + of_value + value_columns, mask=is_value & is_new, other=0.0)
            x += tl.load(kept_row + 2 * KEY_DIM + value_columns, mask=is_value & is_kept, other=0.0)
            value += x.to(tl.float32) * tl.load(taps + of_value + value_columns, mask=is_value, other=0.0).to(
                tl.float32
            )
        query, key, value = silu(query), silu(key), silu(value)
        is_new = position >= start
        new_row = first + position - start
        kept_gates = recent_ptr + (position % ring) * ROW + OWN
        forgotten_row = forgotten_ptr + new_row * forgotten_stride
        forgotten = tl.load(forgotten_row + of_forgotten, mask=is_channel & is_new, other=0.0)
        forgotten += tl.load(kept_gates + WRITTEN + channels, mask=is_channel & (position < start), other=0.0)
        x = forgotten.to(tl.float32) + dt_bias
        rate = softplus(x, exp(-tl.abs(x)))
        if MOST_FORGOTTEN is None:
            memory *= exp(-forgets * rate)[None, :]
        else:
            memory *= exp(-MOST_FORGOTTEN / (1.0 + exp(-forgets * x)))[None, :]
        gate_row = gate_ptr + new_row * gate_stride + head * VALUE_DIM
        gate = tl.load(gate_row + value_columns, mask=is_value & is_new, other=0.0)
        if IS_STATE_SPACE:
            memory += (value * rate)[:, None] * key[None, :]
            found = tl.sum(memory * query[None, :], axis=1) + tl.load(skip_ptr + head) * value
        else:
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + LENGTH_EPS) * (KEY_DIM**-0.5)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + LENGTH_EPS)
            written = tl.load(written_ptr + new_row * written_stride + head, mask=is_new, other=0.0)
            written += tl.load(kept_gates, mask=position < start, other=0.0)
            known = tl.sum(memory * key[None, :], axis=1)
            change = (value - known) / (1.0 + exp(-written.to(tl.float32)))
            if WRITES_TWICE:
                change *= 2.0
            memory += change[:, None] * key[None, :]
            found = tl.sum(memory * query[None, :], axis=1)
            scale = tl.rsqrt(tl.sum(found * found, axis=0) / VALUE_DIM + tl.load(eps_ptr))
            found *= scale * tl.load(norm_ptr + value_columns, mask=is_value, other=0.0)
        if BY_CHANNEL:
            result = (found / (1.0 + exp(-gate.to(tl.float32)))).to(gate.dtype)
        else:
            result = (found * silu(gate.to(tl.float32))).to(gate.dtype)
        out_row = out_ptr + new_row * (NUM_VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM
        tl.store(out_row + value_columns, result, mask=is_value & is_new)
    if is_someones:
        if certain == stop:
            tl.store(places, memory, mask=is_element)
        tl.debug_barrier()  # other warps have read what was kept
        tl.store(reached_ptr + at, certain)
        for position in range(tl.maximum(start, stop - ring), stop):
            row = mixed_ptr + (first + position - start) * mixed_stride
            forgotten_row = forgotten_ptr + (first + position - start) * forgotten_stride
            kept_row = recent_ptr + (position % ring) * ROW
            tl.store(kept_row + key_columns, tl.load(row + of_query + key_columns, mask=is_key), mask=is_key)
            tl.store(kept_row + KEY_DIM + key_columns, tl.load(row + of_key + key_columns, mask=is_key), mask=is_key)
            value_row = tl.load(row + of_value + value_columns, mask=is_value)
            tl.store(kept_row + 2 * KEY_DIM + value_columns, value_row, mask=is_value)
            if written_ptr is not None:
                written_row = written_ptr + (first + position - start) * written_stride
                tl.store(kept_row + OWN, tl.load(written_row + head))
            forgotten = tl.load(forgotten_row + of_forgotten, mask=is_channel)
            tl.store(kept_row + OWN + WRITTEN + channels, forgotten, mask=is_channel)


@triton.jit
def _bias(bias_ptr, first, columns, is_column, BLOCK: tl.constexpr):
    """What a convolution begins with, [BLOCK] float32."""
    if bias_ptr is None:
        bias = tl.zeros([BLOCK], tl.float32)
    else:
        bias = tl.load(bias_ptr + first + columns, mask=is_column, other=0.0).to(tl.float32)
    return bias


def gated_delta(
    rows: DeltaRows, segments: RecurrentSegments, states: DeltaStates, weights: DeltaWeights, heads: DeltaHeads
) -> Tensor:
    """As the reference, but rows of no segment hold whatever was there."""
    num_rows, num_segments = len(rows.mixed), len(segments.starts)
    rows.require(heads)
    assert rows.mixed.dtype == states.recent.dtype
    assert states.memory.is_contiguous() and states.recent.is_contiguous() and weights.convolution.is_contiguous()
    out = torch.empty(num_rows, heads.values, dtype=rows.mixed.dtype, device=rows.mixed.device)
    overlaps = can_overlap(rows.mixed.device)
    key_block, value_block = next_power_of_2(heads.key_dim), next_power_of_2(heads.value_dim)
    if num_rows:
        gated_delta_kernel[(num_segments, heads.num_value_heads)](
            out,
            rows.mixed,
            rows.gate,
            rows.forgotten,
            rows.written,
            segments.starts,
            segments.ends,
            segments.slots,
            segments.first_rows,
            segments.counts,
            states.memory,
            states.recent,
            states.reached,
            weights.convolution,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            weights.eps,
            weights.bias,
            weights.skip,
            rows.mixed.stride(0),
            rows.gate.stride(0),
            rows.forgotten.stride(0),
            0 if rows.written is None else rows.written.stride(0),
            segments.num_rows or 0,
            segments.offset,
            segments.end_offset,
            states.recent.shape[2],
            NUM_KEY_HEADS=heads.num_key_heads,
            NUM_VALUE_HEADS=heads.num_value_heads,
            KEY_DIM=heads.key_dim,
            VALUE_DIM=heads.value_dim,
            KEY_BLOCK=key_block,
            VALUE_BLOCK=value_block,
            TAPS=heads.taps,
            ROW=heads.row,
            IS_STATE_SPACE=heads.is_state_space,
            BY_CHANNEL=heads.forgets_by_channel,
            MOST_FORGOTTEN=heads.most_forgotten,
            WRITES_TWICE=heads.writes_twice,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
            num_warps=min(8, max(1, key_block * value_block // (32 * NUM_NUMBERS))),
        )
    return out
