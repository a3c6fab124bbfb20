"""What programs of kernels/linear.py and of experts' and heads' products do with a tile: its sums, and what follows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.partial_sums import scale_and_add
from kernels.reference import act_and_mul
from kernels.tanh import gelu_power, tanh
from kernels.weight_elements import HALF_SPAN, ZERO, as_factors, codes_as_factors, numbers_per_element

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
def load_inputs(x_ptrs, columns, start, is_token, in_features, EVEN_K: tl.constexpr):
    """[TOKENS, n], of columns from start; x_ptrs point at those from 0."""
    if EVEN_K:
        x = tl.load(x_ptrs + start, mask=is_token, other=0.0)
    else:
        x = tl.load(x_ptrs + start, mask=is_token & (start + columns < in_features), other=0.0)
    return x


@triton.jit
def add_step(
    sums,  # [FEATURES, TOKENS]
    numbers,  # [FEATURES, n]
    x,  # [TOKENS, n]
    high_x,  # [TOKENS, n], of codes in the higher bits
    scale_ptrs,  # [FEATURES], of the first group if STEP_GROUPS
    zero_ptrs,  # [FEATURES], of the first group, or None
    group,  # of the step, its first
    STEP_GROUPS: tl.constexpr,
    READING: tl.constexpr,
):
    own = sums
    if STEP_GROUPS:
        own = tl.zeros_like(sums)
    if numbers_per_element(READING) > 1:
        zeros = tl.full((1, 1), ZERO, tl.int8)
        if zero_ptrs is not None:
            zeros = tl.load(zero_ptrs + group)[:, None]
        low = codes_as_factors(numbers & 15, zeros, x.dtype, READING)
        own = tl.dot(low, tl.trans(x), own, input_precision="ieee")
        if STEP_GROUPS == 2:  # the second of the codes in higher bits
            sums += own * tl.load(scale_ptrs + group)[:, None]
            own = tl.zeros_like(sums)
            group += 1
            if zero_ptrs is not None:
                zeros = tl.load(zero_ptrs + group)[:, None]
        high = codes_as_factors(numbers >> 4, zeros, x.dtype, READING)
        own = tl.dot(high, tl.trans(high_x), own, input_precision="ieee")
    else:
        own = tl.dot(as_factors(numbers, x.dtype, READING), tl.trans(x), own, input_precision="ieee")
    if STEP_GROUPS:
        own = sums + own * tl.load(scale_ptrs + group)[:, None]
    return own


@triton.jit
def sum_tile(
    x_ptrs,  # [TOKENS, n], of the first step's columns
    columns,  # [1, n], as columns_of_step has them
    is_token,  # [TOKENS, 1]
    row_ptrs,  # [FEATURES, 1], of weight rows at column 0
    up_distance,  # from each to its up row, if GATED
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
    total = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
    up_total = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
    for split in range(first_split, first_split + num_splits):
        sums = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
        up_sums = tl.zeros((FEATURES, TOKENS), dtype=tl.float32)
        begin = split * split_width
        for start in range(begin, tl.minimum(begin + split_width, in_features), BLOCK_K):
            x = load_inputs(x_ptrs, columns, start, is_token, in_features, EVEN_K)
            high_x = x
            place = start
            if PER_ELEMENT > 1:
                high_x = load_inputs(x_ptrs, columns, start + HALF_SPAN, is_token, in_features, EVEN_K)
                place = tl.multiple_of(start // PER_ELEMENT, HALF_SPAN)
            group = start // group_size
            weight = load_columns(row_ptrs + places, place, in_features // PER_ELEMENT, EVEN_K)
            sums = add_step(sums, weight, x, high_x, row_scales, row_zeros, group, STEP_GROUPS, READING)
            if GATED:
                up = load_columns(row_ptrs + up_distance + places, place, in_features // PER_ELEMENT, EVEN_K)
                up_sums = add_step(up_sums, up, x, high_x, up_scales, up_zeros, group, STEP_GROUPS, READING)
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
def results_of_tile(
    sums,  # [FEATURES, TOKENS]
    up_sums,  # of the up rows, if GATED
    scales_ptr,  # one for each weight row, or None
    bias_ptr,
    features,
    out_features,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of what is gated
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
            up_sums = tl.where(tl.abs(up_sums) > LIMIT, tl.where(up_sums > 0.0, LIMIT, -LIMIT), up_sums) + 1.0
            power = ALPHA * sums
        sums = sums / (1.0 + tl.exp(-power)) * up_sums
    if SOFTCAP > 0.0:
        sums = tanh(sums / SOFTCAP) * SOFTCAP
    return sums


@triton.jit
def store_tile(results, out_ptr, features, tokens, num_rows, out_features):
    """results: [FEATURES, TOKENS]; out_ptr: [num_rows, out_features]."""
    places = tokens.to(tl.int64)[None, :] * out_features + features[:, None]
    is_place = (tokens < num_rows)[None, :] & (features < out_features)[:, None]
    tl.store(out_ptr + places, results.to(out_ptr.dtype.element_ty), mask=is_place)
