"""kernels/reference/sigmoid_gate.py in one launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.sizes import cdiv

BLOCK = 1024  # columns of a program


@Kernel
@triton.jit
def sigmoid_gate_kernel(
    x_ptr,  # [num_rows, WIDTH], rows x_stride apart
    gate_ptr,  # [num_rows, WIDTH], or one number a row; rows gate_stride apart
    out_ptr,  # [num_rows, WIDTH]
    x_stride,
    gate_stride,
    WIDTH: tl.constexpr,
    IS_ONE: tl.constexpr,  # a gate for all columns
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    if OVERLAPS:
        await_input()
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_column, other=0.0)
    places = columns * 0 if IS_ONE else columns
    gate = tl.load(gate_ptr + row * gate_stride + places, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (x.to(tl.float32) * tl.sigmoid(gate)).to(x.dtype), mask=is_column)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x: [num_rows, width]; gate: the same, or [num_rows, 1]; rows may be strided. Contiguous, of x's dtype."""
    num_rows, width = x.shape
    assert gate.shape in ((num_rows, width), (num_rows, 1)) and gate.dtype == x.dtype
    assert x.stride(1) == 1 and (gate.shape[1] == 1 or gate.stride(1) == 1)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    overlaps = can_overlap(x.device)
    if num_rows:
        sigmoid_gate_kernel[(num_rows, cdiv(width, BLOCK))](
            x,
            gate,
            out,
            x.stride(0),
            gate.stride(0),
            WIDTH=width,
            IS_ONE=gate.shape[1] == 1,
            BLOCK=BLOCK,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
        )
    return out
