"""What programs leave of a part of a row, its best tokens in order and its sum of exponentials, and how parts merge.

A logit's exponential depends on the logit alone but for a power of two, and sums are in float64. So neither the rows
beside a row nor the way the vocabulary is cut moves a token, nor a log-probability but where the last bits of a float64
decide how it is rounded. The last program to arrive merges (kernels/last_to_arrive.py).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exp2 import LOG2_E

LEAST: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # the rank of nothing
NO_EXPONENT: tl.constexpr = tl.constexpr(-0x40000000)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
LN_2_HIGH: tl.constexpr = tl.constexpr(0.693359375)  # few bits, so that products with exponents are exact
LN_2_LOW: tl.constexpr = tl.constexpr(-2.12194440e-4)


@triton.jit
def number_or_least(scores):
    """A NaN is as -inf."""
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def sum_of_exponentials(scores):
    """(sum, exponent): exp of the float32 scores adds up to the float64 sum times 2**exponent; without NaN or +inf."""
    is_number = scores > float("-inf")
    finite = tl.where(is_number, scores, 0.0)
    exponents = tl.floor(finite * LOG2_E + 0.5)
    mantissas = tl.exp(finite - exponents * LN_2_HIGH - exponents * LN_2_LOW)
    exponents = tl.where(is_number, exponents.to(tl.int32), NO_EXPONENT)
    largest = tl.max(exponents, axis=0)
    # Below 2**-126 of the largest nothing reaches the last bit of the sum.
    lower = exponents - largest
    powers = ((tl.maximum(lower, -126) + 127) << 23).to(tl.float32, bitcast=True)
    terms = tl.where(is_number & (lower >= -126), mantissas * powers, 0.0)
    return tl.sum(terms.to(tl.float64), axis=0), largest


@triton.jit
def log_of_sums(sums_ptr, exponents_ptr, parts, is_part):
    """float64: the logarithm of what the parts of a row add up to."""
    exponents = tl.load(exponents_ptr + parts, mask=is_part, other=NO_EXPONENT, cache_modifier=".cg")
    largest = tl.max(exponents, axis=0)
    lower = exponents - largest
    powers = ((tl.maximum(lower, -1022) + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    sums = tl.load(sums_ptr + parts, mask=is_part & (lower >= -1022), other=0.0, cache_modifier=".cg")
    total = tl.sum(sums * powers, axis=0)
    return largest.to(tl.float64) * LN_2 + tl.log(tl.where(total > 0.0, total, 1.0))


@triton.jit
def log_prob_of(score, log_sum):
    """float32, at most 0; -inf of a score that is."""
    log_prob = tl.minimum(score.to(tl.float64) - log_sum, 0.0).to(tl.float32)
    return tl.where(score > float("-inf"), log_prob, float("-inf"))


@triton.jit
def store_best(ranks_ptr, ranks, width):
    """The `width` highest ranks, from the best on; no two are alike."""
    for place in range(width):
        best = tl.max(ranks, axis=0)
        tl.store(ranks_ptr + place, best)
        ranks = tl.where(ranks == best, LEAST, ranks)


@triton.jit
def first_heads(ranks_ptr, is_part, listed):
    """The best of each part's list, of `listed` ranks."""
    return tl.load(ranks_ptr, mask=is_part & (listed > 0), other=LEAST, cache_modifier=".cg")


@triton.jit
def take_best(ranks_ptr, heads, taken, is_part, listed):
    """(the best of all lists' heads, the heads without it, how many each list has given).

    ranks_ptr: of each part's list, of `listed` ranks.
    """
    best = tl.max(heads, axis=0)
    is_best = is_part & (heads == best)
    taken += is_best.to(tl.int32)
    # From the first-level cache, which is_last_to_arrive has emptied: lists are read rank by rank.
    following = tl.load(ranks_ptr + taken, mask=is_best & (taken < listed), other=LEAST)
    return best, tl.where(is_best, following, heads), taken
