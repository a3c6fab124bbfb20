"""y = x W^T, and act(x Wg^T) * (x Wu^T), with a row's bits independent of the other rows, their number and its place.

The weight is the first operand of the product, 64 of its rows to four warps, and the tokens are the second: on Hopper
every launch, of one row or of thousands, is made of the same wgmma m64nNk16, whose N alone grows. What decides the
order of a sum, the step along in_features and where it is cut into partial sums, follows from the weight's shape and
dtype. The number of rows decides what moves no bits (kernels/linear_plan.py): how many tokens and features a program
owns, and whether the partial sums of a tile are found by one program or by several. Either way they are added as
((0 + p0) + p1) + ... in float32: of several programs the last to arrive does it, or the launch behind them, to which
the parts are left (kernels/reference/partial_sums.py).
(Batch-invariant kernels: He et al., Thinking Machines Lab, 2025; tiles shared along the sum: Stream-K, Osama et al.,
arXiv 2301.03598.)

What follows the sum is float32 too: bias, gate and activation come before the one rounding.

A weight held in 8 or 4 bits (kernels/quantized_weight.py) is read so. Its numbers are exact in every dtype that rows
have, and so are those of an fp4 times its block scales; scales of 32 bits meet sums: at the end where an output has
one, else behind each step, which lies in one group.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.last_to_arrive import arrival_counters, is_last_to_arrive
from kernels.linear_plan import LinearPlan, plan_linear
from kernels.linear_tile import results_of_tile, store_tile, sum_of_partials, sum_tile
from kernels.quantized_weight import QuantizedWeight
from kernels.reference.act_and_mul import Activation, name_and_limit
from kernels.reference.partial_sums import PartialSums
from kernels.shared_memory import shared_memory
from kernels.sizes import cdiv
from kernels.weight_elements import Elements, take_apart


# Not specialized on num_rows: Triton would compile other programs for 1 and for multiples of 16.
@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,  # [num_rows, in_features], rows x_stride apart
    weight_ptr,  # [out_features, weight_stride]; if GATED as many up rows follow
    scales_ptr,  # [weight rows, groups] float32 of a quantized weight, or None
    zeros_ptr,  # [weight rows, groups] int8 of int4 with zero points, or None
    block_scales_ptr,  # [weight rows, block_stride] uint8 of fp4, or None
    bias_ptr,  # one for each weight row, or None
    out_ptr,  # [num_rows, out_features]; if LEAVES [SPLITS, num_rows, out_features] float32
    partials_ptr,  # if IS_SPREAD and not LEAVES [tiles, SPLITS, FEATURES, TOKENS] float32
    arrivals_ptr,  # likewise [tiles] int32, zeros before and after
    num_rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,  # in elements
    block_stride,
    split_width,  # columns of a partial sum, a multiple of BLOCK_K
    group_size,  # columns that share a scale, a multiple of BLOCK_K, if STEP_GROUPS
    num_groups,
    SPLITS: tl.constexpr,
    IS_SPREAD: tl.constexpr,  # each partial sum of a tile has a program; else one finds them all
    LEAVES: tl.constexpr,  # the partial sums to the launch behind this one
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # as results_of_tile has them
    MOST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EVEN_K: tl.constexpr,  # in_features is a multiple of BLOCK_K
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP_GROUPS: tl.constexpr,  # a step's sums take the scales of its group; else a weight row has one
    READING: tl.constexpr,  # as Elements.reading
    OVERLAPS: tl.constexpr,  # with the launch before
):
    # Neighbours take the tokens of one weight tile, which so comes from memory once.
    token_tile, feature_tile = tl.program_id(0), tl.program_id(1)
    first_split, num_splits = 0, SPLITS
    if IS_SPREAD:
        first_split, num_splits = feature_tile % SPLITS, 1
        feature_tile = feature_tile // SPLITS
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    features = feature_tile * FEATURES + tl.arange(0, FEATURES)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    is_token = (tokens < num_rows)[:, None]
    # Features behind the last are computed as the last and not stored: the loop has no mask for them.
    rows = tl.minimum(features, out_features - 1).to(tl.int64)
    row_ptrs = weight_ptr + rows[:, None] * weight_stride
    row_scales, up_scales, row_zeros, up_zeros = scales_ptr, scales_ptr, zeros_ptr, zeros_ptr
    row_block_scales, up_block_scales = block_scales_ptr, block_scales_ptr
    up_groups = tl.cast(out_features, tl.int64) * num_groups
    if STEP_GROUPS:
        row_scales = scales_ptr + rows * num_groups
        up_scales = row_scales + up_groups
    if zeros_ptr is not None:
        row_zeros = zeros_ptr + rows * num_groups
        up_zeros = row_zeros + up_groups
    if block_scales_ptr is not None:
        row_block_scales = block_scales_ptr + rows[:, None] * block_stride
        up_block_scales = row_block_scales + tl.cast(out_features, tl.int64) * block_stride
    up_distance = tl.cast(out_features, tl.int64) * weight_stride

    if OVERLAPS:
        await_input()
    total, up_total = sum_tile(
        x_ptrs,
        is_token,
        row_ptrs,
        up_distance,
        row_block_scales,
        up_block_scales,
        row_scales,
        up_scales,
        row_zeros,
        up_zeros,
        in_features,
        first_split,
        num_splits,
        split_width,
        group_size,
        GATED,
        EVEN_K,
        STEP_GROUPS,
        READING,
        BLOCK_K,
    )
    if LEAVES:
        part_ptr = out_ptr + tl.cast(first_split, tl.int64) * num_rows * out_features
        store_tile(total, part_ptr, features, tokens, num_rows, out_features)
    else:
        is_last = True
        if IS_SPREAD:
            tile = feature_tile * tl.num_programs(0) + token_tile
            places = tl.arange(0, FEATURES)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
            partial_ptrs = partials_ptr + tile.to(tl.int64) * (SPLITS * FEATURES * TOKENS) + places
            tl.store(partial_ptrs + first_split * (FEATURES * TOKENS), total)
            is_last = is_last_to_arrive(arrivals_ptr + tile, SPLITS)
        if is_last:
            if IS_SPREAD:
                total = sum_of_partials(partial_ptrs, SPLITS, FEATURES, TOKENS)
            end_scales = scales_ptr
            if STEP_GROUPS:
                end_scales = None
            results = results_of_tile(
                total, up_total, end_scales, bias_ptr, features, out_features, GATED, ACTIVATION, MOST, SOFTCAP
            )
            store_tile(results, out_ptr, features, tokens, num_rows, out_features)


def linear(
    x: Tensor,  # [num_rows, in_features], rows may lie further apart
    weight: Tensor | QuantizedWeight,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    *,
    out_dtype: torch.dtype | None = None,  # None: that of x
    softcap: float | None = None,  # results become softcap * tanh(result / softcap) (the logits of Gemma 2)
) -> Tensor:  # [num_rows, out_features]
    """x W^T + bias, summed in float32 and rounded once, to out_dtype.

    x, weight and bias share a dtype: bfloat16, float16 or float32. Launches on one device follow one another (the
    arrival counters are shared): one stream, or streams that wait for each other.
    """
    out, held = x.new_empty(len(x), weight.shape[0], dtype=out_dtype), take_apart(weight)
    _launch(x, weight, held, bias, out, _plan(x, weight, held, gated=False), softcap=softcap)
    return out


def linear_in_parts(
    x: Tensor,  # [num_rows, in_features], rows may lie further apart
    weight: Tensor | QuantizedWeight,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
) -> Tensor | PartialSums:  # [num_rows, out_features]
    """linear, left in partial sums where these have programs of their own."""
    held = take_apart(weight)
    plan = _plan(x, weight, held, gated=False)
    if not plan.is_spread or len(x) == 0:
        out = x.new_empty(len(x), weight.shape[0])
        _launch(x, weight, held, bias, out, plan)
        return out
    parts = x.new_empty(plan.splits, len(x), weight.shape[0], dtype=torch.float32)
    _launch(x, weight, held, None, parts, plan)
    return PartialSums(parts=parts, scales=None if held.group_size else held.scales, bias=bias, dtype=x.dtype)


def gated_linear(
    x: Tensor,  # [num_rows, in_features], rows may lie further apart
    weight: Tensor | QuantizedWeight,  # [2 * intermediate, in_features], gate rows first
    bias: Tensor | None = None,  # [2 * intermediate]
    activation: Activation = "silu",
) -> Tensor:  # [num_rows, intermediate]
    """activation(x Wg^T + bg) * (x Wu^T + bu) in float32, rounded once, to the dtype of x; as linear otherwise."""
    out, held = x.new_empty(len(x), weight.shape[0] // 2), take_apart(weight)
    _launch(x, weight, held, bias, out, _plan(x, weight, held, gated=True), activation=activation)
    return out


def _plan(x: Tensor, weight: Tensor | QuantizedWeight, held: Elements, *, gated: bool) -> LinearPlan:
    return plan_linear(
        max(len(x), 1),
        weight.shape[0] // (1 + gated),
        weight.shape[1],
        element_size=x.element_size(),
        gated=gated,
        number_bits=held.bits,
        group_size=held.group_size,
        capacity=shared_memory(x.device),
    )


def _launch(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    held: Elements,  # of the weight
    bias: Tensor | None,
    out: Tensor,  # [num_rows, out_features], of half as many features as weight has rows: gated; or parts of them
    plan: LinearPlan,
    *,
    activation: Activation = "silu",
    softcap: float | None = None,
) -> None:
    (num_rows, in_features), out_features = x.shape, out.shape[-1]
    gated, leaves = weight.shape[0] == 2 * out_features, out.dim() == 3
    numbers, scales, zeros, block_scales, _, _, group_size, reading = held
    assert weight.shape == ((1 + gated) * out_features, in_features) and numbers.is_contiguous()
    assert x.stride(1) == 1 and x.dtype == weight.dtype
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    if out.numel() == 0:
        return
    token_tiles, feature_tiles = cdiv(num_rows, plan.tokens), cdiv(out_features, plan.features)
    partials, arrivals = None, None
    if plan.is_spread:
        feature_tiles *= plan.splits
    if plan.is_spread and not leaves:
        num_partials = token_tiles * feature_tiles * plan.features * plan.tokens
        partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
        arrivals = arrival_counters(plan.num_tiles, x.device)
    overlaps = can_overlap(x.device)
    name, most = name_and_limit(activation)
    linear_kernel[(token_tiles, feature_tiles)](
        x,
        numbers,
        scales,
        zeros,
        block_scales,
        bias,
        out,
        partials,
        arrivals,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        numbers.stride(0),
        0 if block_scales is None else block_scales.stride(0),
        plan.split_width,
        group_size or in_features,
        1 if scales is None else scales.shape[1],
        SPLITS=plan.splits,
        IS_SPREAD=plan.is_spread,
        LEAVES=leaves,
        GATED=gated,
        ACTIVATION=name,
        MOST=most,
        SOFTCAP=softcap or 0.0,
        EVEN_K=in_features % plan.block_k == 0,
        TOKENS=plan.tokens,
        FEATURES=plan.features,
        BLOCK_K=plan.block_k,
        STEP_GROUPS=plan.step_groups,
        READING=reading,
        OVERLAPS=overlaps,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        launch_pdl=overlaps,
    )
