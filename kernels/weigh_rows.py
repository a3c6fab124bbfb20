"""The first half of a norm (kernels/reference/weighed_rows.py) of rows that no product leaves: embeddings."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.linear_tile import store_tile
from kernels.reference.weighed_rows import PART, WeighedRows
from kernels.rms_norm import warps_of_row
from kernels.weighed_tile import store_squares, weigh


@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def weigh_rows_kernel(
    x_ptr,  # [num_rows, hidden], rows x_stride apart
    weight_ptr,  # [hidden]
    weighed_ptr,  # [num_rows, hidden]
    squares_ptr,  # [num_rows, parts]
    num_rows,
    hidden,
    x_stride,
    BLOCK: tl.constexpr,  # >= hidden
    OVERLAPS: tl.constexpr,  # with the launch before
):
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)
    if OVERLAPS:
        await_input()
    weight = tl.load(weight_ptr + columns, mask=columns < hidden, other=0.0)
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride + columns[:, None]
    x = tl.load(x_ptrs, mask=(columns < hidden)[:, None], other=0.0)
    store_squares(x, squares_ptr, 0, columns, rows, num_rows, hidden)
    store_tile(weigh(x, weight), weighed_ptr, columns, rows, num_rows, hidden)


def weigh_rows(x: Tensor, weight: Tensor, eps: Tensor) -> WeighedRows:
    """x: [num_rows, hidden], rows may lie further apart; weight: [hidden], of x's dtype or float32; eps: [] float32."""
    num_rows, hidden = x.shape
    assert x.stride(1) == 1 and weight.shape == (hidden,) and weight.is_contiguous()
    assert weight.dtype in (x.dtype, torch.float32)
    weighed = empty_weighed(num_rows, hidden, x.dtype, eps)
    if num_rows:
        block, overlaps = max(triton.next_power_of_2(hidden), PART), can_overlap(x.device)
        weigh_rows_kernel[(num_rows,)](
            x,
            weight,
            weighed.rows,
            weighed.squares,
            num_rows,
            hidden,
            x.stride(0),
            BLOCK=block,
            OVERLAPS=overlaps,
            num_warps=warps_of_row(block),
            launch_pdl=overlaps,
        )
    return weighed


def empty_weighed(num_rows: int, hidden: int, dtype: torch.dtype, eps: Tensor) -> WeighedRows:
    """To be filled, where eps is."""
    assert eps.shape == () and eps.dtype == torch.float32
    return WeighedRows(
        rows=torch.empty(num_rows, hidden, dtype=dtype, device=eps.device),
        squares=torch.empty(num_rows, triton.cdiv(hidden, PART), dtype=torch.float32, device=eps.device),
        eps=eps,
    )
