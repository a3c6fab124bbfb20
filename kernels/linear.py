"""y = x W^T, and act(x Wg^T) * (x Wu^T), with a row's bits independent of the other rows, their number and its place.

The weight is the first operand of the product, 64 of its rows to four warps, and the tokens are the second: on Hopper
every launch, of one row or of thousands, is made of the same wgmma m64nNk16, whose N alone grows. What decides the
order of a sum, the step along in_features and where it is cut into partial sums, follows from the weight's shape and
dtype. The number of rows decides what moves no bits (kernels/linear_plan.py): how many tokens and features a program
owns, and whether the partial sums of a tile are found by one program or by several. Either way they are added as
((0 + p0) + p1) + ... in float32; of several programs the last to arrive does it, so a product stays one launch.
(Batch-invariant kernels: He et al., Thinking Machines Lab, 2025; tiles shared along the sum: Stream-K, Osama et al.,
arXiv 2301.03598.)

What follows the sum is float32 too: bias, gate and activation come before the one rounding, and so do both halves of a
norm (kernels/reference/weighed_rows.py): the factors of rows that await theirs, and what a product adds itself to.

A weight held in 8 or 4 bits (kernels/quantized_weight.py) is read so. Its numbers are exact in every dtype that rows
have; scales meet sums, never numbers: at the end where an output has one, else behind each step, which lies in one
group.
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
from kernels.linear_plan import plan_linear
from kernels.linear_tile import add_tile, results_of_tile, store_tile, sum_of_partials, sum_tile
from kernels.quantized_weight import QuantizedWeight
from kernels.reference.act_and_mul import Activation
from kernels.reference.weighed_rows import PART, WeighedRows
from kernels.shared_memory import shared_memory
from kernels.weigh_rows import empty_weighed
from kernels.weighed_tile import add_halves, load_squares, norm_factors, store_squares, sum_of_squares, weigh
from kernels.weight_elements import columns_of_step, take_apart

# Of a tile whose registers hold squares, or the norm's weights, from before its sums to their end.
MOST_SQUARES: tl.constexpr = tl.constexpr(2048)
MOST_TOKENS: tl.constexpr = tl.constexpr(64)


# Not specialized on num_rows: Triton would compile other programs for 1 and for multiples of 16.
@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,  # [num_rows, in_features], rows x_stride apart
    weight_ptr,  # [out_features, weight_stride]; if GATED as many up rows follow
    scales_ptr,  # [weight rows, groups] float32 of a quantized weight, or None
    zeros_ptr,  # [weight rows, groups] int8 of int4 with zero points, or None
    bias_ptr,  # one for each weight row, or None
    squares_ptr,  # of weighed rows [num_rows, parts], or None
    eps_ptr,  # [] float32, of weighed rows
    residual_ptr,  # [num_rows, out_features], to add to, rows residual_stride apart; or None
    norm_ptr,  # [out_features], the weight of the sum's norm, where there is a residual stream
    weighed_ptr,  # [num_rows, out_features], likewise
    out_squares_ptr,  # [num_rows, parts of out_features], likewise
    out_ptr,  # [num_rows, out_features]
    partials_ptr,  # if IS_SPREAD [tiles, SPLITS, FEATURES, TOKENS] float32
    arrivals_ptr,  # if IS_SPREAD [tiles] int32, zeros before and after
    num_rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,  # in_features; of codes half of them
    residual_stride,
    split_width,  # columns of a partial sum, a multiple of BLOCK_K
    group_size,  # columns that share a scale, a multiple of BLOCK_K if HAS_GROUPS
    num_groups,
    SPLITS: tl.constexpr,
    IS_SPREAD: tl.constexpr,  # each partial sum of a tile has a program; else one finds them all
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # as results_of_tile has them
    SOFTCAP: tl.constexpr,
    EVEN_K: tl.constexpr,  # in_features is a multiple of BLOCK_K
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_GROUPS: tl.constexpr,  # a weight row has several scales
    READING: tl.constexpr,  # as Elements.reading
    PARTS: tl.constexpr,  # >= those of weighed rows
    OVERLAPS: tl.constexpr,  # with the launch before
):
    # Neighbours take the tokens of one weight tile, which so comes from memory once.
    num_token_tiles = tl.cdiv(num_rows, TOKENS)
    token_tile = tl.program_id(0) % num_token_tiles
    feature_tile = tl.program_id(0) // num_token_tiles
    first_split, num_splits = 0, SPLITS
    if IS_SPREAD:
        first_split, num_splits = feature_tile % SPLITS, 1
        feature_tile = feature_tile // SPLITS
    tokens = token_tile * TOKENS + tl.arange(0, TOKENS)
    features = feature_tile * FEATURES + tl.arange(0, FEATURES)
    columns = columns_of_step(BLOCK_K, READING)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + columns
    is_token = (tokens < num_rows)[:, None]
    # Features behind the last are computed as the last and not stored: the loop has no mask for them.
    rows = tl.minimum(features, out_features - 1).to(tl.int64)
    row_ptrs = weight_ptr + rows[:, None] * weight_stride
    row_scales, up_scales, row_zeros, up_zeros = scales_ptr, scales_ptr, zeros_ptr, zeros_ptr
    up_groups = tl.cast(out_features, tl.int64) * num_groups
    if HAS_GROUPS:
        row_scales = scales_ptr + rows * num_groups
        up_scales = row_scales + up_groups
    if zeros_ptr is not None:
        row_zeros = zeros_ptr + rows * num_groups
        up_zeros = row_zeros + up_groups
    up_distance = tl.cast(out_features, tl.int64) * weight_stride

    if OVERLAPS:
        await_input()
    # What the end needs of norms is asked for here where it is little, to come while the sums are computed.
    has_squares: tl.constexpr = TOKENS * PARTS <= MOST_SQUARES
    has_weight: tl.constexpr = TOKENS <= MOST_TOKENS
    if squares_ptr is not None and has_squares:
        eps = tl.load(eps_ptr)
        squares = load_squares(squares_ptr, 0, tokens, num_rows, in_features, PARTS)
    if residual_ptr is not None and has_weight:
        norm_weight = tl.load(norm_ptr + features, mask=features < out_features, other=0.0)
    total, up_total = sum_tile(
        x_ptrs,
        columns,
        is_token,
        row_ptrs,
        up_distance,
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
        HAS_GROUPS,
        READING,
        BLOCK_K,
    )

    is_last = True
    if IS_SPREAD:
        tile = feature_tile * num_token_tiles + token_tile
        places = tl.arange(0, FEATURES)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        partial_ptrs = partials_ptr + tile.to(tl.int64) * (SPLITS * FEATURES * TOKENS) + places
        tl.store(partial_ptrs + first_split * (FEATURES * TOKENS), total)
        is_last = is_last_to_arrive(arrivals_ptr + tile, SPLITS)
    if is_last:
        if squares_ptr is not None:
            if has_squares:
                sum_of_row = add_halves(squares)
            else:
                eps = tl.load(eps_ptr)
                sum_of_row = sum_of_squares(squares_ptr, tokens, num_rows, in_features, PARTS)
            factors = norm_factors(sum_of_row, in_features, eps)
        sums, up_sums = total, up_total
        if IS_SPREAD:
            sums = sum_of_partials(partial_ptrs, SPLITS, FEATURES, TOKENS)
        if squares_ptr is not None:
            sums *= factors
            up_sums *= factors
        end_scales = scales_ptr
        if HAS_GROUPS:
            end_scales = None
        results = results_of_tile(
            sums, up_sums, end_scales, bias_ptr, features, out_features, GATED, ACTIVATION, SOFTCAP
        )
        if residual_ptr is not None:
            results = add_tile(results, residual_ptr, residual_stride, features, tokens, num_rows, out_features)
        store_tile(results, out_ptr, features, tokens, num_rows, out_features)
        if residual_ptr is not None:
            first = feature_tile * FEATURES
            store_squares(results, out_squares_ptr, first, features, tokens, num_rows, out_features)
            if not has_weight:
                norm_weight = tl.load(norm_ptr + features, mask=features < out_features, other=0.0)
            store_tile(weigh(results, norm_weight), weighed_ptr, features, tokens, num_rows, out_features)


def linear(
    x: Tensor | WeighedRows,  # [num_rows, in_features], rows may lie further apart
    weight: Tensor | QuantizedWeight,  # [out_features, in_features]
    bias: Tensor | None = None,  # [out_features]
    *,
    out_dtype: torch.dtype | None = None,  # None: that of x
    softcap: float | None = None,  # results become softcap * tanh(result / softcap) (the logits of Gemma 2)
) -> Tensor:  # [num_rows, out_features]
    """x W^T + bias, summed in float32 and rounded once, to out_dtype; of weighed rows norm(x) W^T + bias.

    x, weight and bias share a dtype: bfloat16, float16 or float32. Launches on one device follow one another (the
    arrival counters are shared): one stream, or streams that wait for each other.
    """
    out = _empty(x, weight.shape[0], out_dtype)
    _launch(x, weight, bias, out, softcap=softcap)
    return out


def gated_linear(
    x: Tensor | WeighedRows,  # [num_rows, in_features], rows may lie further apart
    weight: Tensor | QuantizedWeight,  # [2 * intermediate, in_features], gate rows first
    bias: Tensor | None = None,  # [2 * intermediate]
    activation: Activation = "silu",
) -> Tensor:  # [num_rows, intermediate]
    """activation(x Wg^T + bg) * (x Wu^T + bu) in float32, rounded once, to the dtype of x; as linear otherwise."""
    out = _empty(x, weight.shape[0] // 2)
    _launch(x, weight, bias, out, activation=activation)
    return out


def linear_to_norm(
    x: Tensor,  # [num_rows, in_features], rows may lie further apart
    weight: Tensor | QuantizedWeight,  # [hidden, in_features]
    bias: Tensor | None,  # [hidden]
    residual: Tensor,  # [num_rows, hidden], of x's dtype, rows may lie further apart
    norm_weight: Tensor,  # [hidden], of x's dtype or float32
    eps: Tensor,  # [] float32, on x's device
) -> tuple[WeighedRows, Tensor]:
    """What is left of norm(x W^T + bias + residual), and the sum in the norm [num_rows, hidden], rounded once."""
    total = _empty(x, weight.shape[0])
    assert residual.shape == total.shape and residual.stride(1) == 1 and residual.dtype == x.dtype
    assert norm_weight.shape == weight.shape[:1] and norm_weight.is_contiguous()
    assert norm_weight.dtype in (x.dtype, torch.float32)
    weighed = empty_weighed(len(total), total.shape[1], x.dtype, eps)
    _launch(x, weight, bias, total, to_norm=(residual, norm_weight, weighed.rows, weighed.squares))
    return weighed, total


def _empty(x: Tensor | WeighedRows, out_features: int, dtype: torch.dtype | None = None) -> Tensor:
    rows = x.rows if isinstance(x, WeighedRows) else x
    return torch.empty(len(rows), out_features, dtype=dtype or rows.dtype, device=rows.device)


def _launch(
    x: Tensor | WeighedRows,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    out: Tensor,  # [num_rows, out_features]; of half as many features as weight has rows: gated
    *,
    activation: Activation = "silu",
    softcap: float | None = None,
    to_norm: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,  # as the kernel's, from residual_ptr on
) -> None:
    rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, WeighedRows) else (x, None, None)
    (num_rows, in_features), out_features = rows.shape, out.shape[1]
    gated = weight.shape[0] == 2 * out_features
    numbers, scales, zeros, bits, group_size, reading = take_apart(weight)
    assert weight.shape == ((1 + gated) * out_features, in_features) and numbers.is_contiguous()
    assert rows.stride(1) == 1 and rows.dtype == weight.dtype
    if squares is not None and eps is not None:
        assert squares.shape == (num_rows, triton.cdiv(in_features, PART)) and squares.is_contiguous()
        assert squares.dtype == eps.dtype == torch.float32 and eps.shape == ()
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    if out.numel() == 0:
        return
    plan = plan_linear(
        num_rows,
        out_features,
        in_features,
        element_size=rows.element_size(),
        gated=gated,
        number_bits=bits,
        group_size=group_size,
        capacity=shared_memory(rows.device),
    )
    num_programs, partials, arrivals = plan.num_tiles, None, None
    if plan.is_spread:
        num_programs *= plan.splits
        num_partials = num_programs * plan.features * plan.tokens
        partials = torch.empty(num_partials, dtype=torch.float32, device=rows.device)
        arrivals = arrival_counters(plan.num_tiles, rows.device)
    overlaps = can_overlap(rows.device)
    linear_kernel[(num_programs,)](
        rows,
        numbers,
        scales,
        zeros,
        bias,
        squares,
        eps,
        *(to_norm or (None, None, None, None)),
        out,
        partials,
        arrivals,
        num_rows,
        out_features,
        in_features,
        rows.stride(0),
        numbers.stride(0),
        1 if to_norm is None else to_norm[0].stride(0),
        plan.split_width,
        group_size or in_features,
        1 if scales is None else scales.shape[1],
        SPLITS=plan.splits,
        IS_SPREAD=plan.is_spread,
        GATED=gated,
        ACTIVATION=activation,
        SOFTCAP=softcap or 0.0,
        EVEN_K=in_features % plan.block_k == 0,
        TOKENS=plan.tokens,
        FEATURES=plan.features,
        BLOCK_K=plan.block_k,
        HAS_GROUPS=group_size is not None,
        READING=reading,
        PARTS=1 if squares is None else triton.next_power_of_2(squares.shape[1]),
        OVERLAPS=overlaps,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        launch_pdl=overlaps,
    )
