"""Adding up what a product has left in parts, in a launch of its own or in one that reads the rows anyway.

kernels/reference/partial_sums.py is the definition.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.reference.partial_sums import PartialSums
from kernels.sizes import cdiv

BLOCK = 1024  # columns of a program


@triton.jit
def scale_and_add(sums, scales, bias):
    """float32 all; None: no scales, or no bias.

    Fused by name, a product alone with zeros: a compiler fuses it with what a program adds next, and where that comes
    in another program it cannot.
    """
    if scales is not None and bias is not None:
        sums = tl.fma(sums, scales, bias)
    elif scales is not None:
        sums = tl.fma(sums, scales, tl.zeros_like(sums))
    elif bias is not None:
        sums += bias
    return sums


@triton.jit
def load_row(
    row_ptr,  # at column 0, of the first part perhaps
    columns,
    is_column,
    part_stride,
    scales_ptr,
    bias_ptr,
    NUM_PARTS: tl.constexpr,  # 0: the row is whole
    dtype: tl.constexpr,  # of the row
):
    """Columns of a product's row, zeros where there are none."""
    if NUM_PARTS == 0:
        values = tl.load(row_ptr + columns, mask=is_column, other=0.0)
    else:
        sums = tl.zeros(columns.shape, tl.float32)
        for part in tl.static_range(NUM_PARTS):
            sums += tl.load(row_ptr + tl.cast(part, tl.int64) * part_stride + columns, mask=is_column, other=0.0)
        scales, bias = None, None
        if scales_ptr is not None:
            scales = tl.load(scales_ptr + columns, mask=is_column, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        values = scale_and_add(sums, scales, bias).to(dtype)
    return values


def row_arguments(x: Tensor | PartialSums) -> dict[str, Any]:
    """What load_row takes of rows [num_rows, width], by the names that kernels have for it."""
    if isinstance(x, PartialSums):
        assert x.parts.is_contiguous() and (x.bias is None or x.bias.dtype == x.dtype)
        return {
            "x_ptr": x.parts,
            "scales_ptr": x.scales,
            "bias_ptr": x.bias,
            "x_stride": x.parts.stride(1),
            "part_stride": x.parts.stride(0),
            "NUM_PARTS": len(x.parts),
        }
    assert x.stride(1) == 1
    rest = dict.fromkeys(("scales_ptr", "bias_ptr"))
    return {"x_ptr": x, **rest, "x_stride": x.stride(0), "part_stride": 0, "NUM_PARTS": 0}


@Kernel
@triton.jit
def add_up_kernel(
    x_ptr,  # [NUM_PARTS, num_rows, width] float32, rows x_stride and parts part_stride apart
    residual_ptr,  # [num_rows, width], rows residual_stride apart; or None
    out_ptr,  # [num_rows, width]
    scales_ptr,  # [width] float32, or None
    bias_ptr,  # [width], or None
    x_stride,
    part_stride,
    residual_stride,
    width,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if OVERLAPS:
        await_input()
    x = load_row(x_ptr + row * x_stride, columns, is_column, part_stride, scales_ptr, bias_ptr, NUM_PARTS, dtype)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(out_ptr + row * width + columns, x, mask=is_column)


def add_up(x: PartialSums, residual: Tensor | None = None) -> Tensor:
    """[num_rows, width], rounded; with a residual of this shape and dtype added, and rounded again."""
    num_rows, width = x.shape
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1 and residual.dtype == x.dtype)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.parts.device)
    overlaps = can_overlap(out.device)
    if out.numel():
        add_up_kernel[(num_rows, cdiv(width, BLOCK))](
            residual_ptr=residual,
            out_ptr=out,
            residual_stride=0 if residual is None else residual.stride(0),
            width=width,
            BLOCK=BLOCK,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
            **row_arguments(x),
        )
    return out
