"""What programs of kernels/linear.py and of experts' and heads' products do with a tile: its sums, and what follows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels import quantized_weight
from kernels.partial_sums import scale_and_add
from kernels.reference import act_and_mul
from kernels.tanh import gelu_power, tanh
from kernels.weight_elements import (
    fp4_as_factors,
    fp8_as_factors,
    int4_as_factors,
    int8_as_factors,
    numbers_per_element,
)

FP4_GROUP: tl.constexpr = tl.constexpr(quantized_weight.FP4_GROUP)
ZERO: tl.constexpr = tl.constexpr(quantized_weight.ZERO)
# Of clamped_swiglu.
ALPHA: tl.constexpr = tl.constexpr(act_and_mul.ALPHA)
LIMIT: tl.constexpr = tl.constexpr(act_and_mul.LIMIT)


@triton.jit
def load_columns(ptrs, start, width, IS_EVEN: tl.constexpr):
    """Columns start.. of weight rows, zeros behind the last of width; ptrs [FEATURES, n] point at column 0."""
    if IS_EVEN:
        values = tl.load(ptrs + start)
    else:
        is_column = (start + tl.arange(0, ptrs.shape[1]) < width)[None, :]
        values = tl.load(ptrs + start, mask=is_column, other=0.0)
    return values


@triton.jit
def add_step(
    sums,  # [FEATURES, TOKENS]
    elements,  # [FEATURES, n]
    x,  # [TOKENS, BLOCK_K]
    block_scale_ptrs,  # [FEATURES, 1], of the step's first, or None
    scales,  # [FEATURES], of the step's group if STEP_GROUPS
    zeros,  # [FEATURES], of the step's group
    STEP_GROUPS: tl.constexpr,
    READING: tl.constexpr,
):
    own = sums
    if STEP_GROUPS:
        own = tl.zeros_like(sums)
    if READING == "int4":
        factors = int4_as_factors(elements, zeros[:, None], x.dtype)
    elif READING == "fp4":
        octets = tl.load(block_scale_ptrs + tl.arange(0, x.shape[1] // FP4_GROUP)[None, :])
        factors = fp4_as_factors(elements, octets, x.dtype)
    elif READING == "int8":
        factors = int8_as_factors(elements, x.dtype)
    elif READING == "fp8":
        factors = fp8_as_factors(elements, x.dtype)
    else:
        factors = elements
    own = tl.dot(factors, tl.trans(x), own, input_precision="ieee")
    if STEP_GROUPS:
        own = sums + own * scales[:, None]
    return own


@triton.jit
def load_group(scale_ptrs, zero_ptrs, group, FEATURES: tl.constexpr, STEP_GROUPS: tl.constexpr):
    """Scales, if STEP_GROUPS, and zero points of a group [FEATURES]; pointers of the first one's."""
    scales = tl.zeros((FEATURES,), tl.float32)
    zeros = tl.full((FEATURES,), ZERO, tl.int8)
    if STEP_GROUPS:
        scales = tl.load(scale_ptrs + group)
    if zero_ptrs is not None:
        zeros = tl.load(zero_ptrs + group)
    return scales, zeros


@triton.jit
def sum_tile(
    x_ptrs,  # [TOKENS, BLOCK_K], of the first step's columns
    is_token,  # [TOKENS, 1]
    row_ptrs,  # [FEATURES, 1], of weight rows at column 0
    up_distance,  # from each to its up row, if GATED
    row_block_scales,  # [FEATURES, 1], of the first block, or None
    up_block_scales,  # of the up rows, if GATED
    row_scales,  # [FEATURES], of the first group if STEP_GROUPS
    up_scales,  # of the up rows, if GATED
    row_zeros,  # [FEATURES], of the first group, or None
    up_zeros,  # of the up rows, if GATED
    in_features,
    first_split,  # of num_splits partial sums
    num_splits,
    split_width,
    group_size,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    STEP_GROUPS: tl.constexpr,
    READING: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sums [FEATURES, TOKENS] of the rows and of the up rows, their partial sums added in order."""
    FEATURES: tl.constexpr = row_ptrs.shape[0]
    TOKENS: tl.constexpr = x_ptrs.shape[0]
    PER_ELEMENT: tl.constexpr = numbers_per_element(READING)
    places = tl.arange(0, BLOCK_K // PER_ELEMENT)[None, :]
    num_elements = in_features
    if PER_ELEMENT > 1:
        num_elements = tl.cdiv(in_features, 4 * PER_ELEMENT) * 4  # of whole spans
    total = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
    up_total = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
    for split in range(first_split, first_split + num_splits):
        sums = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
        up_sums = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
        begin = split * split_width
        group = begin // group_size
        scales, zeros = load_group(row_scales, row_zeros, group, FEATURES, STEP_GROUPS)
        own_up_scales, own_up_zeros = load_group(up_scales, up_zeros, group, FEATURES, STEP_GROUPS)
        for start in range(begin, tl.minimum(begin + split_width, in_features), BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs + start, mask=is_token, other=0.0)
            else:
                is_input = is_token & (start + tl.arange(0, BLOCK_K) < in_features)[None, :]
                x = tl.load(x_ptrs + start, mask=is_input, other=0.0)
            # What memory has of a group is asked for a step before it is needed.
            group = tl.minimum(start + BLOCK_K, in_features - 1) // group_size
            next_scales, next_zeros = load_group(row_scales, row_zeros, group, FEATURES, STEP_GROUPS)
            next_up_scales, next_up_zeros = load_group(up_scales, up_zeros, group, FEATURES, STEP_GROUPS)
            place = start
            block_scales, up_scales_of_blocks = row_block_scales, up_block_scales
            if PER_ELEMENT > 1:
                place = tl.multiple_of(start // PER_ELEMENT, BLOCK_K // PER_ELEMENT)
            if READING == "fp4":
                block = tl.multiple_of(start // FP4_GROUP, BLOCK_K // FP4_GROUP)
                block_scales, up_scales_of_blocks = row_block_scales + block, up_block_scales + block
            weight = load_columns(row_ptrs + places, place, num_elements, EVEN_K)
            sums = add_step(sums, weight, x, block_scales, scales, zeros, STEP_GROUPS, READING)
            if GATED:
                up = load_columns(row_ptrs + up_distance + places, place, num_elements, EVEN_K)
                up_sums = add_step(
                    up_sums, up, x, up_scales_of_blocks, own_up_scales, own_up_zeros, STEP_GROUPS, READING
                )
            scales, zeros, own_up_scales, own_up_zeros = next_scales, next_zeros, next_up_scales, next_up_zeros
        total += sums
        up_total += up_sums
    return total, up_total


@triton.jit
def sum_of_partials(partial_ptrs, SPLITS: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr):
    """((0 + p0) + p1) + ... of a tile; partial_ptrs: [FEATURES, TOKENS], of the first."""
    total = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
    if TOKENS > 128:  # all at once would not fit registers
        for place in range(SPLITS):
            total += tl.load(partial_ptrs + place * (FEATURES * TOKENS), cache_modifier=".cg")
    else:
        for place in tl.static_range(SPLITS):
            total += tl.load(partial_ptrs + place * (FEATURES * TOKENS), cache_modifier=".cg")
    return total


@triton.jit
def cut_off(sums, most: tl.constexpr):
    """To [-most, most]; what is no number stays so."""
    return tl.where(tl.abs(sums) > most, tl.where(sums > 0.0, most, -most), sums)


@triton.jit
def results_of_tile(
    sums,  # [FEATURES, TOKENS]
    up_sums,  # of the up rows, if GATED
    scales_ptr,  # one for each weight row, or None
    bias_ptr,
    features,
    out_features,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of what is gated
    MOST: tl.constexpr,  # of what it gives, and of the other half; or None
    SOFTCAP: tl.constexpr,  # results become SOFTCAP * tanh(result / SOFTCAP); 0.0: they do not
):
    """What the sums become, not yet rounded."""
    is_feature = features < out_features
    scales, up_scales, bias, up_bias = None, None, None, None
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + features, mask=is_feature, other=0.0)[:, None]
        if GATED:
            up_scales = tl.load(scales_ptr + out_features + features, mask=is_feature, other=0.0)[:, None]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_bias = tl.load(bias_ptr + out_features + features, mask=is_feature, other=0.0).to(tl.float32)[:, None]
    sums = scale_and_add(sums, scales, bias)
    if GATED:
        up_sums = scale_and_add(up_sums, up_scales, up_bias)
        power = sums
        if ACTIVATION == "gelu_tanh":
            power = gelu_power(sums)
        if ACTIVATION == "clamped_swiglu":
            sums = tl.where(sums > LIMIT, LIMIT, sums)  # what is no number stays so
            up_sums = cut_off(up_sums, LIMIT) + 1.0
            power = ALPHA * sums
        sums = sums / (1.0 + tl.exp(-power))
        if MOST is not None:
            sums = tl.where(sums > MOST, MOST, sums)
            up_sums = cut_off(up_sums, MOST)
        sums *= up_sums
    if SOFTCAP > 0.0:
        sums = tanh(sums / SOFTCAP) * SOFTCAP
    return sums


@triton.jit
def store_tile(results, out_ptr, features, tokens, num_rows, out_features):
    """results: [FEATURES, TOKENS]; out_ptr: [num_rows, out_features]."""
    places = tokens.to(tl.int64)[None, :] * out_features + features[:, None]
    is_place = (tokens < num_rows)[None, :] & (features < out_features)[:, None]
    tl.store(out_ptr + places, results.to(out_ptr.dtype.element_ty), mask=is_place)
