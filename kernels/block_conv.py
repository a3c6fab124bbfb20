"""kernels/reference/block_conv.py in one launch: a program has columns of one row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.partial_sums import load_row, row_arguments
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.partial_sums import PartialSums
from kernels.sizes import cdiv

BLOCK = 512  # columns of a program
SEGMENTS = 64  # that a program looks at together for its row's


@Kernel
@triton.jit(
    do_not_specialize=["rows_each", "num_segments"],
    do_not_specialize_on_alignment=["first_rows_ptr"],
)
def block_conv_kernel(
    x_ptr,  # [num_rows, WIDTH], rows x_stride apart; in NUM_PARTS parts, part_stride apart, if that is not 0
    scales_ptr,  # [WIDTH] float32, or None
    bias_ptr,  # [WIDTH], or None
    deltas_ptr,  # [num_rows, TAPS * WIDTH / GROUP], rows deltas_stride apart
    base_ptr,  # [TAPS, WIDTH]
    first_rows_ptr,  # [num_segments] int64, ascending; None: rows_each says it
    out_ptr,  # [num_rows, WIDTH]
    x_stride,
    part_stride,
    deltas_stride,
    rows_each,
    num_segments,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a number of `deltas`
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if OVERLAPS:
        await_input()
    if first_rows_ptr is None:
        place = row % rows_each
    else:
        first = tl.zeros((), dtype=tl.int64)
        for start in range(0, num_segments, SEGMENTS):
            segments = start + tl.arange(0, SEGMENTS)
            firsts = tl.load(first_rows_ptr + segments, mask=segments < num_segments, other=0)
            first = tl.maximum(first, tl.max(tl.where(firsts <= row, firsts, 0), axis=0))
        place = row - first
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        is_seen = is_column & (place >= tap)
        seen = load_row(
            x_ptr + (row - tap) * x_stride, columns, is_seen, part_stride, scales_ptr, bias_ptr, NUM_PARTS, dtype
        )
        delta = tl.load(
            deltas_ptr + row * deltas_stride + tap * (WIDTH // GROUP) + columns // GROUP, mask=is_column, other=0.0
        )
        weight = tl.load(base_ptr + tap * WIDTH + columns, mask=is_column, other=0.0)
        total += (weight.to(tl.float32) + delta.to(tl.float32)) * seen.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, total.to(dtype), mask=is_column)


def block_conv(x: Tensor | PartialSums, deltas: Tensor, base: Tensor, segments: RecurrentSegments) -> Tensor:
    """x: [num_rows, width]; deltas: [num_rows, taps * num_groups], rows may be strided; base: [taps, width]."""
    (num_rows, width), taps = x.shape, len(base)
    assert deltas.stride(1) == 1 and base.is_contiguous() and deltas.dtype == base.dtype == x.dtype
    assert base.shape[1] == width and width * taps % deltas.shape[1] == 0
    out = torch.empty(num_rows, width, dtype=x.dtype, device=base.device)
    overlaps = can_overlap(out.device)
    if num_rows:
        first_rows = segments.first_rows
        block_conv_kernel[(num_rows, cdiv(width, BLOCK))](
            deltas_ptr=deltas,
            base_ptr=base,
            first_rows_ptr=first_rows,
            out_ptr=out,
            deltas_stride=deltas.stride(0),
            rows_each=segments.num_rows or 0,
            num_segments=0 if first_rows is None else len(first_rows),
            WIDTH=width,
            GROUP=width * taps // deltas.shape[1],
            TAPS=taps,
            BLOCK=BLOCK,
            SEGMENTS=SEGMENTS,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
            **row_arguments(x),
        )
    return out
