"""kernels/reference/short_conv.py in one launch: a program has columns of a request, and goes over its rows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.short_conv import ConvStates, ConvWeights
from kernels.sizes import cdiv

BLOCK = 64  # columns of a program
ROWS = 16  # that it computes together


@triton.jit
def products(mixed_ptr, rows, is_row, columns, is_column, mixed_stride, WIDTH: tl.constexpr):
    """What values are once they are gated, [ROWS, BLOCK], as they are kept; rows: in the launch."""
    places = mixed_ptr + rows[:, None] * mixed_stride + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    gate = tl.load(places, mask=mask, other=0.0)
    value = tl.load(places + 2 * WIDTH, mask=mask, other=0.0)
    return (gate.to(tl.float32) * value.to(tl.float32)).to(gate.dtype)


@Kernel
@triton.jit(
    do_not_specialize=["offset", "rows_each"],
    do_not_specialize_on_alignment=["starts_ptr", "slots_ptr", "first_rows_ptr", "counts_ptr"],
)
def short_conv_kernel(
    out_ptr,  # [num_rows, WIDTH]
    mixed_ptr,  # [num_rows, 3 * WIDTH], rows mixed_stride apart
    starts_ptr,  # [num_segments] int64, as the next three
    slots_ptr,
    first_rows_ptr,  # None, as the next: rows_each says it
    counts_ptr,
    recent_ptr,  # [num_slots, ring, WIDTH]
    convolution_ptr,  # [TAPS, WIDTH]
    bias_ptr,  # [WIDTH], or None
    mixed_stride,
    rows_each,
    offset,
    ring,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    segment = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    if OVERLAPS:
        await_input()
    first, count = (segment * rows_each).to(tl.int64), rows_each.to(tl.int64)
    if counts_ptr is not None:
        first, count = tl.load(first_rows_ptr + segment), tl.load(counts_ptr + segment)
    slot = tl.load(slots_ptr + segment)
    start = tl.maximum(tl.load(starts_ptr + segment) + offset, 0)
    recent_ptr += slot * ring * WIDTH
    for begin in range(0, count, ROWS):
        rows = begin + tl.arange(0, ROWS)
        is_row = rows < count
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            places = rows - (TAPS - 1) + tap
            is_new, is_kept = is_row & (places >= 0), is_row & (places < 0) & (start + places >= 0)
            new = products(mixed_ptr, first + places, is_new, columns, is_column, mixed_stride, WIDTH)
            kept_rows = recent_ptr + (tl.maximum(start + places, 0) % ring)[:, None] * WIDTH
            kept = tl.load(kept_rows + columns[None, :], mask=is_kept[:, None] & is_column[None, :], other=0.0)
            weight = tl.load(convolution_ptr + tap * WIDTH + columns, mask=is_column, other=0.0)
            total += tl.where(is_new[:, None], new, kept).to(tl.float32) * weight.to(tl.float32)[None, :]
        mask = is_row[:, None] & is_column[None, :]
        new_rows = (first + rows)[:, None]
        gate = tl.load(mixed_ptr + new_rows * mixed_stride + WIDTH + columns[None, :], mask=mask, other=0.0)
        result = tl.where(slot > 0, total * gate.to(tl.float32), 0.0).to(gate.dtype)
        tl.store(out_ptr + new_rows * WIDTH + columns[None, :], result, mask=mask)
    if slot > 0:
        tl.debug_barrier()  # other warps have read what was kept
        for begin in range(tl.maximum(count - ring, 0), count, ROWS):
            rows = begin + tl.arange(0, ROWS)
            is_row = rows < count
            new = products(mixed_ptr, first + rows, is_row, columns, is_column, mixed_stride, WIDTH)
            kept_rows = recent_ptr + ((start + rows) % ring)[:, None] * WIDTH
            tl.store(kept_rows + columns[None, :], new, mask=is_row[:, None] & is_column[None, :])


def short_conv(mixed: Tensor, segments: RecurrentSegments, states: ConvStates, weights: ConvWeights) -> Tensor:
    """As the reference, but rows of no segment hold whatever was there."""
    num_rows, (taps, width) = len(mixed), weights.convolution.shape
    assert mixed.shape[1] == 3 * width and mixed.stride(1) == 1 and states.recent.shape[2] == width
    assert states.recent.is_contiguous() and weights.convolution.is_contiguous()
    assert mixed.dtype == states.recent.dtype == weights.convolution.dtype
    assert weights.bias is None or (weights.bias.is_contiguous() and weights.bias.dtype == mixed.dtype)
    out = torch.empty(num_rows, width, dtype=mixed.dtype, device=mixed.device)
    overlaps = can_overlap(mixed.device)
    if num_rows:
        short_conv_kernel[(len(segments.starts), cdiv(width, BLOCK))](
            out,
            mixed,
            segments.starts,
            segments.slots,
            segments.first_rows,
            segments.counts,
            states.recent,
            weights.convolution,
            weights.bias,
            mixed.stride(0),
            segments.num_rows or 0,
            segments.offset,
            states.recent.shape[1],
            WIDTH=width,
            BLOCK=BLOCK,
            ROWS=ROWS,
            TAPS=taps,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
        )
    return out
