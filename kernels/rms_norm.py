"""Root mean square norm, with or without the residual add before it; kernels/reference/rms_norm.py is the definition.

One launch, a program a row. A row lies in one tile, whose size and warps follow from its length, so the order of the
sum does too. Rounding follows the definition: the new residual, the normed row, and its product with the weight.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap

ELEMENTS_OF_A_WARP = 512


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_rows, num_heads, HIDDEN]
    residual_ptr,  # as the outputs, or None
    weight_ptr,  # [HIDDEN]
    eps_ptr,  # [] float32
    normed_ptr,  # [num_rows, num_heads, HIDDEN], contiguous
    new_residual_ptr,  # the same, or None
    num_heads,
    row_stride,
    head_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HIDDEN
    OVERLAPS: tl.constexpr,  # with the launch before
):
    place = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < HIDDEN
    if OVERLAPS:
        await_input()
    x_row = x_ptr + place // num_heads * row_stride + place % num_heads * head_stride
    x = tl.load(x_row + columns, mask=is_column, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place * HIDDEN + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(new_residual_ptr + place * HIDDEN + columns, x, mask=is_column)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + tl.load(eps_ptr))
    normed = (wide * scale).to(x.dtype)
    product = (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(normed_ptr + place * HIDDEN + columns, product, mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x: [num_rows, hidden] or [num_rows, num_heads, hidden], contiguous in hidden only (heads of a fused projection);
    weight: [hidden] in x's dtype; eps: [] float32 on x's device -> x's shape and dtype, contiguous."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), all shaped as x, with which residual shares its dtype; it is contiguous."""
    normed, new_residual = _launch(x, residual, weight, eps)
    assert new_residual is not None
    return normed, new_residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: Tensor) -> tuple[Tensor, Tensor | None]:
    hidden = x.shape[-1]
    assert x.dim() in (2, 3) and x.stride(-1) == 1
    assert weight.shape == (hidden,) and weight.is_contiguous() and weight.dtype == x.dtype
    assert eps.shape == () and eps.dtype == torch.float32 and eps.device == x.device
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous() and residual.dtype == x.dtype)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = None if residual is None else torch.empty_like(normed)
    if normed.numel() == 0:
        return normed, new_residual
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    block = triton.next_power_of_2(hidden)
    overlaps = can_overlap(x.device)
    rms_norm_kernel[(normed.numel() // hidden,)](
        x,
        residual,
        weight,
        eps,
        normed,
        new_residual,
        heads.shape[1],
        heads.stride(0),
        heads.stride(1),
        HIDDEN=hidden,
        BLOCK=block,
        OVERLAPS=overlaps,
        num_warps=min(max(block // ELEMENTS_OF_A_WARP, 1), 16),
        launch_pdl=overlaps,
    )
    return normed, new_residual
