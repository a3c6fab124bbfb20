"""Root mean square norms; kernels/reference/rms_norm.py is the definition.

With or without the residual add before the norm, and of two rows side by side, of which one is gathered. One launch
each, a program a normed row. A row lies in one tile, whose size and warps follow from its length, so the order of the
sum does too. Rounding follows the definition: the new residual, what it is scaled to, the normed row, and its product
with the weight.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap, prefetch
from kernels.kernel import Kernel
from kernels.partial_sums import load_row, row_arguments
from kernels.reference.partial_sums import PartialSums
from kernels.registers import MAX_REGISTERS
from kernels.sizes import next_power_of_2

ELEMENTS_OF_A_WARP = 512
LINE: tl.constexpr = tl.constexpr(32)  # elements of a cache line, at least: float32's


@triton.jit
def await_x(x_weight_ptr, weight_ptr, eps_ptr, x_eps_ptr, sum_scale_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """await_input; weights and eps, which have left the cache since the last step, come closer while it waits."""
    starts = tl.minimum(tl.arange(0, (BLOCK + LINE - 1) // LINE) * LINE, HIDDEN - 1)
    if x_weight_ptr is not None:
        prefetch(x_weight_ptr + starts)
    if weight_ptr is not None:
        prefetch(weight_ptr + starts)
    prefetch(eps_ptr)
    if x_eps_ptr is not None:
        prefetch(x_eps_ptr)
    if sum_scale_ptr is not None:
        prefetch(sum_scale_ptr)
    await_input()


@triton.jit
def norm_row(x, weight, eps, HIDDEN: tl.constexpr):
    """x: [BLOCK], zeros behind HIDDEN -> the same shape and dtype."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    normed = wide * scale
    if weight.dtype == x.dtype:  # a weight of float32 multiplies what is not yet rounded
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@Kernel
@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_rows, HIDDEN], rows x_stride apart; if NUM_PARTS so many of them, float32, part_stride apart
    residual_ptr,  # [num_rows, HIDDEN], rows residual_stride apart; or None
    x_weight_ptr,  # [HIDDEN], of the norm of x before the sum; or None
    weight_ptr,  # [HIDDEN]; None: the sum is all
    eps_ptr,  # [] float32
    x_eps_ptr,  # [] float32, of the norm of x; None: as the other
    sum_scale_ptr,  # [] float32, of the sum with the residual; or None
    normed_ptr,  # [num_rows, HIDDEN], rows out_stride apart, x itself perhaps; None without a weight
    sum_ptr,  # the same, or None
    scales_ptr,  # of partial sums [HIDDEN] float32, or None
    bias_ptr,  # likewise [HIDDEN], or None
    x_stride,
    part_stride,
    residual_stride,
    out_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HIDDEN
    NUM_PARTS: tl.constexpr,  # partial sums that x is left in; 0: none
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < HIDDEN
    dtype: tl.constexpr = (sum_ptr if normed_ptr is None else normed_ptr).dtype.element_ty
    if OVERLAPS:
        await_x(x_weight_ptr, weight_ptr, eps_ptr, x_eps_ptr, sum_scale_ptr, HIDDEN, BLOCK)
    x = load_row(x_ptr + row * x_stride, columns, is_column, part_stride, scales_ptr, bias_ptr, NUM_PARTS, dtype)
    eps = tl.load(eps_ptr)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    if x_weight_ptr is not None:
        x_weight = tl.load(x_weight_ptr + columns, mask=is_column, other=0.0)
        x_eps = eps
        if x_eps_ptr is not None:
            x_eps = tl.load(x_eps_ptr)
        x = norm_row(x, x_weight, x_eps, HIDDEN)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        if sum_scale_ptr is not None:
            x = (x.to(tl.float32) * tl.load(sum_scale_ptr)).to(x.dtype)
        tl.store(sum_ptr + row * out_stride + columns, x, mask=is_column)
    if weight_ptr is not None:
        tl.store(normed_ptr + row * out_stride + columns, norm_row(x, weight, eps, HIDDEN), mask=is_column)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def rms_norm_pair_kernel(
    embeddings_ptr,  # [vocab, HIDDEN]; [num_rows, HIDDEN] without token ids
    token_ids_ptr,  # [num_rows] int64, or None
    states_ptr,  # [num_rows, HIDDEN], rows states_stride apart
    embedding_weight_ptr,  # [HIDDEN]
    state_weight_ptr,  # [HIDDEN]
    eps_ptr,  # [] float32
    out_ptr,  # [num_rows, 2 * HIDDEN]
    states_stride,
    STATE_HALF: tl.constexpr,  # of out: 0 or 1; the other is the embedding's
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HIDDEN
    OVERLAPS: tl.constexpr,  # with the launch before
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < HIDDEN
    half = tl.program_id(1)
    weight_ptr = state_weight_ptr
    if half != STATE_HALF:
        weight_ptr = embedding_weight_ptr
    if OVERLAPS:
        await_x(None, weight_ptr, eps_ptr, None, None, HIDDEN, BLOCK)
    x_ptr = states_ptr + row * states_stride
    if half != STATE_HALF:
        place = row
        if token_ids_ptr is not None:
            place = tl.load(token_ids_ptr + row)
        x_ptr = embeddings_ptr + place * HIDDEN
    x = tl.load(x_ptr + columns, mask=is_column, other=0.0)
    weight, eps = tl.load(weight_ptr + columns, mask=is_column, other=0.0), tl.load(eps_ptr)
    normed_ptr = out_ptr + (2 * row + half) * HIDDEN
    tl.store(normed_ptr + columns, norm_row(x, weight, eps, HIDDEN), mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x: [num_rows, hidden], rows may lie further apart; weight: [hidden]; eps: [] float32 on x's device.

    weight is of x's dtype, or of float32; one of float32 multiplies rows of 16 bits before they are rounded.

    Returns x's shape and dtype, contiguous.
    """
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, None, weight, eps, normed, None)
    return normed


def add_rms_norm(
    x: Tensor | PartialSums,
    residual: Tensor,
    weight: Tensor,
    eps: Tensor,
    x_weight: Tensor | None = None,
    scale: Tensor | None = None,
    x_eps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), both contiguous; residual is of x's shape and dtype, the rest as above.

    With x_weight, of weight's shape and dtype, x is normed by it before it is added (Gemma 2). scale: [] float32 on x's
    device, by which the rounded sum is multiplied (Gemma 4). x_eps: as eps, of the norm of x; None: the same.
    """
    normed, total = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(x, x_weight, residual, weight, eps, normed, total, scale, x_eps)
    return normed, total


def add_normed(
    x: Tensor | PartialSums, residual: Tensor, weight: Tensor, eps: Tensor, scale: Tensor | None = None
) -> Tensor:
    """norm(x) + residual, contiguous; arguments as above."""
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    _launch(x, weight, residual, None, eps, None, total, scale)
    return total


def norm_in_place(x: Tensor, weight: Tensor, eps: Tensor) -> None:
    """rms_norm that overwrites x."""
    _launch(x, None, None, weight, eps, x, None)


def sum_beside_rms_norm(
    x: Tensor | PartialSums,
    residual: Tensor,
    weight: Tensor,
    eps: Tensor,
    x_weight: Tensor | None = None,
    scale: Tensor | None = None,
    x_eps: Tensor | None = None,
) -> Tensor:
    """What add_rms_norm returns as one tensor [num_rows, 2 * hidden]: the sum, and behind it its norm."""
    out = torch.empty(len(residual), 2 * residual.shape[1], dtype=x.dtype, device=residual.device)
    total, normed = out.chunk(2, dim=1)
    _launch(x, x_weight, residual, weight, eps, normed, total, scale, x_eps)
    return out


def rms_norm_pair(
    embeddings: Tensor,  # [vocab, hidden], contiguous; [num_rows, hidden] without token_ids
    token_ids: Tensor | None,  # [num_rows] int64
    states: Tensor,  # [num_rows, hidden], rows may lie further apart
    embedding_weight: Tensor,  # [hidden], of the rows' dtype or of float32
    state_weight: Tensor,  # [hidden], of the same
    eps: Tensor,  # [] float32
    *,
    states_first: bool = False,
) -> Tensor:  # [num_rows, 2 * hidden]
    """The norm of each token's embedding, and behind it that of its state, or the other way round; of one dtype."""
    num_rows, hidden = states.shape
    assert embeddings.is_contiguous() and embeddings.shape[1] == hidden and states.stride(1) == 1
    assert token_ids is None or (token_ids.shape == (num_rows,) and token_ids.is_contiguous())
    assert token_ids is not None or len(embeddings) == num_rows
    assert states.dtype == embeddings.dtype
    for weight in (embedding_weight, state_weight):
        assert weight.shape == (hidden,) and weight.is_contiguous() and weight.dtype in (states.dtype, torch.float32)
    assert embedding_weight.dtype == state_weight.dtype, "a pointer in Triton is to one type"
    assert eps.shape == () and eps.dtype == torch.float32 and eps.device == states.device
    out = torch.empty(num_rows, 2 * hidden, dtype=states.dtype, device=states.device)
    if out.numel() > 0:
        rms_norm_pair_kernel[(num_rows, 2)](
            embeddings,
            token_ids,
            states,
            embedding_weight,
            state_weight,
            eps,
            out,
            states.stride(0),
            STATE_HALF=0 if states_first else 1,
            **_shape_of_rows(hidden, states.device),
        )
    return out


def _launch(
    x: Tensor | PartialSums,
    x_weight: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: Tensor,
    normed: Tensor | None,
    total: Tensor | None,
    scale: Tensor | None = None,  # of total
    x_eps: Tensor | None = None,
) -> None:
    """normed and total, of which one may be missing, have equal strides."""
    num_rows, hidden = x.shape
    out = total if normed is None else normed
    assert out is not None and (weight is None) == (normed is None)
    for own in (weight, x_weight):
        assert own is None or (own.shape == (hidden,) and own.is_contiguous() and own.dtype in (x.dtype, torch.float32))
    assert weight is None or x_weight is None or x_weight.dtype == weight.dtype
    for number in (eps, *(own for own in (scale, x_eps) if own is not None)):
        assert number.shape == () and number.dtype == torch.float32 and number.device == out.device
    assert scale is None or residual is not None
    assert x_eps is None or x_weight is not None
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1 and residual.dtype == x.dtype)
    if out.numel() == 0:
        return
    rms_norm_kernel[(num_rows,)](
        residual_ptr=residual,
        x_weight_ptr=x_weight,
        weight_ptr=weight,
        eps_ptr=eps,
        x_eps_ptr=x_eps,
        sum_scale_ptr=scale,
        normed_ptr=normed,
        sum_ptr=total,
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
        **row_arguments(x),
        **_shape_of_rows(hidden, out.device),
    )


def _shape_of_rows(hidden: int, device: torch.device) -> dict[str, Any]:
    """Constants and launch options of both kernels; they decide the bits of a row."""
    block, overlaps = next_power_of_2(hidden), can_overlap(device)
    return {
        "HIDDEN": hidden,
        "BLOCK": block,
        "OVERLAPS": overlaps,
        "num_warps": min(max(block // ELEMENTS_OF_A_WARP, 1), 16),
        "launch_pdl": overlaps,
        "maxnreg": MAX_REGISTERS,
    }
