"""The products of kernels/reference/experts.py in one launch: a row's are those of kernels/linear.py, bit by bit.

Tiles, steps and partial sums are that module's, and the order of a sum follows from an expert's weight alone. Each
tile of tokens is of one expert. How many tiles an expert fills, the device alone knows; that all of them fill no more
than num_places // TOKENS and one for each expert is known without it, so a launch has so many, and some do nothing.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import await_input, can_overlap
from kernels.kernel import Kernel
from kernels.linear_plan import plan_linear
from kernels.linear_tile import results_of_tile, store_tile, sum_tile
from kernels.quantized_weight import QuantizedWeight
from kernels.reference.act_and_mul import Activation, name_and_limit
from kernels.reference.experts import Routing
from kernels.shared_memory import shared_memory
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight_elements import Elements, take_apart


# Not specialized on num_places, which would make other programs for multiples of 16.
@Kernel
@triton.jit(do_not_specialize=["num_places"])
def linear_of_experts_kernel(
    x_ptr,  # [num_rows, in_features], rows x_stride apart; without rows_ptr one for each place
    rows_ptr,  # [num_places] int64, or None
    starts_ptr,  # [NUM_EXPERTS + 1] int64
    weight_ptr,  # of the first expert [out_features, weight_stride]; if GATED as many up rows follow
    scales_ptr,  # of the first expert [weight rows, groups] float32, or None
    zeros_ptr,  # of the first expert [weight rows, groups] int8, or None
    block_scales_ptr,  # of the first expert [weight rows, block_stride] uint8, or None
    bias_ptr,  # [NUM_EXPERTS, weight rows], or None
    out_ptr,  # [num_places, out_features]
    num_places,
    out_features,
    in_features,
    x_stride,
    weight_stride,  # in elements
    block_stride,
    weight_distance,  # from one expert's weight to the next one's
    scales_distance,  # and of zero points
    block_distance,
    split_width,  # columns of a partial sum, a multiple of BLOCK_K
    group_size,  # columns that share a scale, a multiple of BLOCK_K, if STEP_GROUPS
    num_groups,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # >= NUM_EXPERTS
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # as results_of_tile has them
    MOST: tl.constexpr,
    EVEN_K: tl.constexpr,  # in_features is a multiple of BLOCK_K
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP_GROUPS: tl.constexpr,  # a step's sums take the scales of its group; else a weight row has one
    READING: tl.constexpr,  # as Elements.reading
    OVERLAPS: tl.constexpr,  # with the launch before
):
    # Neighbours take the tokens of one expert, whose weight tile so comes from memory once.
    num_tiles = num_places // TOKENS + NUM_EXPERTS
    tile = tl.program_id(0) % num_tiles
    feature_tile = tl.program_id(0) // num_tiles
    if OVERLAPS:
        await_input()
    # The tiles of an expert begin at start // TOKENS + expert: up to the next one's there are as many as it fills, and
    # at most one more.
    experts = tl.arange(0, EXPERTS)
    starts = tl.load(starts_ptr + experts, mask=experts < NUM_EXPERTS, other=num_places)
    begins = (experts < NUM_EXPERTS) & (starts // TOKENS + experts <= tile)
    expert = tl.sum(begins.to(tl.int32), axis=0) - 1
    start = tl.load(starts_ptr + expert)
    end = tl.load(starts_ptr + expert + 1)
    first = start + (tile - expert - start // TOKENS) * TOKENS
    if first >= end:
        return
    places = first + tl.arange(0, TOKENS)
    is_place = places < end
    rows = places
    if rows_ptr is not None:
        rows = tl.load(rows_ptr + places, mask=is_place, other=0)
    x_ptrs = x_ptr + rows[:, None] * x_stride + tl.arange(0, BLOCK_K)[None, :]
    features = feature_tile * FEATURES + tl.arange(0, FEATURES)
    # Features behind the last are computed as the last and not stored: the loop has no mask for them.
    weight_rows = tl.minimum(features, out_features - 1).to(tl.int64)
    row_ptrs = weight_ptr + expert.to(tl.int64) * weight_distance + weight_rows[:, None] * weight_stride
    if bias_ptr is not None:
        bias_ptr += expert * out_features * (2 if GATED else 1)
    if scales_ptr is not None:
        scales_ptr += expert.to(tl.int64) * scales_distance
    row_scales, up_scales, end_scales = scales_ptr, scales_ptr, scales_ptr
    row_zeros, up_zeros = zeros_ptr, zeros_ptr
    row_block_scales, up_block_scales = block_scales_ptr, block_scales_ptr
    up_groups = tl.cast(out_features, tl.int64) * num_groups
    if STEP_GROUPS:
        row_scales = scales_ptr + weight_rows * num_groups
        up_scales = row_scales + up_groups
        end_scales = None
    if zeros_ptr is not None:
        row_zeros = zeros_ptr + expert.to(tl.int64) * scales_distance + weight_rows * num_groups
        up_zeros = row_zeros + up_groups
    if block_scales_ptr is not None:
        own_block_scales = block_scales_ptr + expert.to(tl.int64) * block_distance
        row_block_scales = own_block_scales + weight_rows[:, None] * block_stride
        up_block_scales = row_block_scales + tl.cast(out_features, tl.int64) * block_stride
    total, up_total = sum_tile(
        x_ptrs,
        is_place[:, None],
        row_ptrs,
        tl.cast(out_features, tl.int64) * weight_stride,
        row_block_scales,
        up_block_scales,
        row_scales,
        up_scales,
        row_zeros,
        up_zeros,
        in_features,
        0,
        SPLITS,
        split_width,
        group_size,
        GATED,
        EVEN_K,
        STEP_GROUPS,
        READING,
        BLOCK_K,
    )
    results = results_of_tile(
        total, up_total, end_scales, bias_ptr, features, out_features, GATED, ACTIVATION, MOST, 0.0
    )
    store_tile(results, out_ptr, features, places, end, out_features)


@dataclass(frozen=True, kw_only=True)
class ExpertsInMemory:
    """The weights of one product, of each expert, and where they lie: found once, not in every launch."""

    first: Elements  # of the first expert
    dtype: torch.dtype  # of the rows
    num_experts: int
    distance: int  # from one expert's numbers to the next one's
    scales_distance: int  # and of zero points
    block_distance: int  # of block_scales

    @classmethod
    def of(cls, weights: Sequence[Tensor | QuantizedWeight]) -> ExpertsInMemory:
        """Views of one tensor [num_experts, ...], or of any storage in which each is as far from the one before; so
        are their scales, zero points and block scales."""
        all_numbers, all_scales, all_zeros, all_blocks, *kinds = zip(*map(take_apart, weights), strict=True)
        assert all(len(set(kind)) == 1 for kind in (*kinds, [zeros is None for zeros in all_zeros]))
        scales_distance = 0 if all_scales[0] is None else distance(all_scales)
        assert all_zeros[0] is None or distance(all_zeros) == scales_distance
        return cls(
            first=take_apart(weights[0]),
            dtype=weights[0].dtype,
            num_experts=len(weights),
            distance=distance(all_numbers),
            scales_distance=scales_distance,
            block_distance=0 if all_blocks[0] is None else distance(all_blocks),
        )


Weights = ExpertsInMemory | Sequence[Tensor | QuantizedWeight]


def gated_linear_of_experts(
    x: Tensor,  # [num_rows, in_features], rows may lie further apart
    weights: Weights,  # of each expert [2 * intermediate, in_features], gate rows first
    routing: Routing,
    biases: Tensor | None = None,  # [num_experts, 2 * intermediate]
    activation: Activation = "silu",
) -> Tensor:  # [num_places, intermediate]
    """activation(x Wg^T + bg) * (x Wu^T + bu) of the expert and the row at each place; else as linear_of_experts."""
    return _launch(x, routing.rows, weights, routing, biases, gated=True, activation=activation)


def linear_of_experts(
    x: Tensor,  # [num_places, in_features], or of_rows [num_rows, in_features]; rows may lie further apart
    weights: Weights,  # of each expert [out_features, in_features]
    routing: Routing,
    biases: Tensor | None = None,  # [num_experts, out_features]
    *,
    of_rows: bool = False,
) -> Tensor:  # [num_places, out_features]
    """x W^T + b of the expert at each place, summed in float32 and rounded once, to the dtype of x.

    x, weights and biases share a dtype: bfloat16, float16 or float32. A sequence of weights is looked through in every
    call.
    """
    return _launch(x, routing.rows if of_rows else None, weights, routing, biases, gated=False)


def distance(views: Sequence[Tensor]) -> int:
    """From each to the next, in elements; contiguous, and of one shape and dtype."""
    first, addresses = views[0], [view.data_ptr() for view in views]
    step = addresses[1] - addresses[0] if len(views) > 1 else 0
    assert addresses == [addresses[0] + number * step for number in range(len(views))] and step % first.itemsize == 0
    assert all(v.shape == first.shape and v.dtype == first.dtype and v.is_contiguous() for v in views)
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    return step // first.itemsize


def _launch(
    x: Tensor,
    rows: Tensor | None,
    weights: Weights,
    routing: Routing,
    biases: Tensor | None,
    *,
    gated: bool,
    activation: Activation = "silu",
) -> Tensor:
    held = weights if isinstance(weights, ExpertsInMemory) else ExpertsInMemory.of(weights)
    numbers, scales, zeros, block_scales, in_features, bits, group_size, reading = held.first
    num_places, num_experts = len(routing.rows), held.num_experts
    weight_rows = len(numbers)
    out_features = weight_rows // (1 + gated)
    assert len(routing.starts) == num_experts + 1 and weight_rows == (1 + gated) * out_features
    assert len(x) == (num_places if rows is None else len(routing.places))
    assert x.shape[1] == in_features and x.stride(1) == 1 and x.dtype == held.dtype
    assert biases is None or (biases.shape == (num_experts, weight_rows) and biases.is_contiguous())
    out = torch.empty(num_places, out_features, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    plan = plan_linear(
        cdiv(num_places, num_experts),  # the rows of an expert, on average
        out_features,
        in_features,
        element_size=x.element_size(),
        gated=gated,
        number_bits=bits,
        group_size=group_size,
        of_experts=True,
        capacity=shared_memory(x.device),
    )
    num_tiles = num_places // plan.tokens + num_experts
    overlaps = can_overlap(x.device)
    name, most = name_and_limit(activation)
    linear_of_experts_kernel[(num_tiles * cdiv(out_features, plan.features),)](
        x,
        rows,
        routing.starts,
        numbers,
        scales,
        zeros,
        block_scales,
        biases,
        out,
        num_places,
        out_features,
        in_features,
        x.stride(0),
        numbers.stride(0),
        0 if block_scales is None else block_scales.stride(0),
        held.distance,
        held.scales_distance,
        held.block_distance,
        plan.split_width,
        group_size or in_features,
        1 if scales is None else scales.shape[1],
        NUM_EXPERTS=num_experts,
        EXPERTS=next_power_of_2(num_experts),
        SPLITS=plan.splits,
        GATED=gated,
        ACTIVATION=name,
        MOST=most,
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
    return out
