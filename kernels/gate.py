"""kernels/reference/gate.py in one launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.reference.gate import GateFunction
from kernels.sizes import cdiv
from kernels.softplus import softplus
from kernels.tanh import gelu_power

BLOCK = 1024  # columns of a program


@Kernel
@triton.jit
def gate_kernel(
    x_ptr,  # [num_rows, WIDTH], rows x_stride apart
    by_ptr,  # [num_rows, WIDTH / COLUMNS], rows by_stride apart
    out_ptr,  # [num_rows, WIDTH]
    x_stride,
    by_stride,
    WIDTH: tl.constexpr,
    FUNCTION: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a gate
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    if OVERLAPS:
        await_input()
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_column, other=0.0)
    by = tl.load(by_ptr + row * by_stride + columns // COLUMNS, mask=is_column, other=0.0).to(tl.float32)
    if FUNCTION == "relu":
        factor = tl.maximum(by, 0.0)
    elif FUNCTION == "identity":
        factor = by
    elif FUNCTION == "softplus":
        factor = softplus(by, tl.exp(-tl.abs(by)))
    else:
        factor = by / (1.0 + tl.exp(-gelu_power(by))) if FUNCTION == "gelu_tanh" else tl.sigmoid(by)
    tl.store(out_ptr + row * WIDTH + columns, (x.to(tl.float32) * factor).to(x.dtype), mask=is_column)


def gate(x: Tensor, by: Tensor, function: GateFunction) -> Tensor:
    """x: [num_rows, width]; by: [num_rows, gates], of x's dtype or float32; rows may be strided."""
    num_rows, width = x.shape
    assert len(by) == num_rows and width % by.shape[1] == 0 and by.dtype in (x.dtype, torch.float32)
    assert x.stride(1) == 1 and (by.shape[1] == 1 or by.stride(1) == 1)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    overlaps = can_overlap(x.device)
    if num_rows:
        gate_kernel[(num_rows, cdiv(width, BLOCK))](
            x,
            by,
            out,
            x.stride(0),
            by.stride(0),
            WIDTH=width,
            FUNCTION=function,
            COLUMNS=width // by.shape[1],
            BLOCK=BLOCK,
            OVERLAPS=overlaps,
            launch_pdl=overlaps,
        )
    return out
