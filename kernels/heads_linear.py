"""The products of kernels/reference/heads_linear.py in one launch, each head's with a weight of its own.

Tiles and steps are those of kernels/linear.py, and what decides the order of a sum follows from a head's weight alone;
so a row's bits depend neither on the other rows nor on their number. All partial sums of a tile are found by one
program: there are as many tiles as heads, and more. Rows and results are parts of wider ones, with whatever lies
between two heads: queries before they are turned, and the queries that attend to latents.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.linear_plan import plan_linear, stages_of_short_sums
from kernels.linear_tile import sum_tile
from kernels.shared_memory import shared_memory
from kernels.sizes import cdiv


# Not specialized on num_rows, which would make other programs for 1 and for multiples of 16.
@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def linear_of_heads_kernel(
    x_ptr,  # [num_rows, num_heads, in_features], strided
    weight_ptr,  # [num_heads * out_features, in_features]
    out_ptr,  # [num_rows, num_heads, out_features], strided
    num_rows,
    out_features,
    in_features,
    x_row_stride,
    x_head_stride,
    out_row_stride,
    out_head_stride,
    split_width,  # columns of a partial sum, a multiple of BLOCK_K
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,  # in_features is a multiple of BLOCK_K
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,  # with the launch before
):
    # Neighbours take the tokens of one weight tile, which so comes from memory once.
    token_tile, feature_tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    features = feature_tile * FEATURES + tl.arange(0, FEATURES)
    is_token = tokens < num_rows
    x_rows = x_ptr + head * x_head_stride + tokens.to(tl.int64)[:, None] * x_row_stride
    # Features behind the last are computed as the last and not stored: the loop has no mask for them.
    rows = head * out_features + tl.minimum(features, out_features - 1)
    if OVERLAPS:
        await_input()
    total, _ = sum_tile(
        x_rows + tl.arange(0, BLOCK_K)[None, :],
        is_token[:, None],
        weight_ptr + rows[:, None] * in_features,
        up_distance=0,
        row_block_scales=None,
        up_block_scales=None,
        row_scales=None,
        up_scales=None,
        row_zeros=None,
        up_zeros=None,
        in_features=in_features,
        first_split=0,
        num_splits=SPLITS,
        split_width=split_width,
        group_size=in_features,
        GATED=False,
        EVEN_K=EVEN_K,
        STEP_GROUPS=False,
        READING="dense",
        BLOCK_K=BLOCK_K,
    )
    out_ptrs = out_ptr + head * out_head_stride + tokens.to(tl.int64)[None, :] * out_row_stride + features[:, None]
    is_place = is_token[None, :] & (features < out_features)[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_place)


def linear_of_heads(
    x: Tensor,  # [num_rows, num_heads, in_features], rows and heads may lie apart
    weight: Tensor,  # [num_heads * out_features, in_features]
    out: Tensor,  # [num_rows, num_heads, out_features], rows and heads may lie apart
) -> None:
    """Writes x[:, head] W[head]^T, summed in float32 and rounded once, into out[:, head].

    x, weight and out share a dtype: bfloat16, float16 or float32.
    """
    num_rows, num_heads, in_features = x.shape
    out_features = out.shape[2]
    assert weight.shape == (num_heads * out_features, in_features) and weight.is_contiguous()
    assert out.shape[:2] == x.shape[:2] and x.stride(2) == out.stride(2) == 1
    assert x.dtype == weight.dtype == out.dtype
    if num_rows == 0:
        return
    plan = plan_linear(
        num_rows,
        out_features,
        in_features,
        element_size=x.element_size(),
        gated=False,
        of_experts=True,
        capacity=shared_memory(x.device),
    )
    overlaps = can_overlap(x.device)
    linear_of_heads_kernel[(cdiv(num_rows, plan.tokens), cdiv(out_features, plan.features), num_heads)](
        x,
        weight,
        out,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        plan.split_width,
        SPLITS=plan.splits,
        EVEN_K=in_features % plan.block_k == 0,
        TOKENS=plan.tokens,
        FEATURES=plan.features,
        BLOCK_K=plan.block_k,
        OVERLAPS=overlaps,
        num_warps=plan.num_warps,
        num_stages=stages_of_short_sums(plan),
        launch_pdl=overlaps,
    )
