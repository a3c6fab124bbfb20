"""kernels/reference/philox.py's words and variates, a number at a time: loops over them fit into vector lanes.

Without fused or reordered arithmetic, so that a variate's bits do not depend on the loop that it is computed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.bits import bits_of_double, double_of_bits
from kernels.cpu.compiled import exact

# Unsigned, all of them: a signed one beside an unsigned makes a float in numba.
LOW, WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
NUM_ROUNDS = 10

HALF, UNIT = np.float64(0.5), np.float64(2.0**-32)
ONE, TWO = np.float64(1.0), np.float64(2.0)
# What is added to a float64's bits so that their exponent is that of the power of two which leaves a mantissa in
# [sqrt(1/2), sqrt(2)); the bits of sqrt(1/2); and the rest.
BELOW_ONE, SQRT_HALF = np.int64(0x3FF0000000000000 - 0x3FE6A09E667F3BCD), np.int64(0x3FE6A09E667F3BCD)
MANTISSA_BITS, MANTISSA, BIAS = np.int64(52), np.int64(0xFFFFFFFFFFFFF), np.int64(1023)
# log(2) in two parts, of which the first times any exponent is exact.
LN2_HIGH, LN2_LOW = np.float64(0.693147180369123816490), np.float64(1.90821492927058770002e-10)
# log(m) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...) for s = (m - 1) / (m + 1), at most 0.172 there: the rest is below 2^-58.
TERMS = tuple(np.float64(1.0 / (2 * k + 1)) for k in range(1, 11))
T1, T2, T3, T4, T5, T6, T7, T8, T9, T10 = TERMS


@exact
def random_words(block: Any, position: Any, stream: Any, draft_step: Any, seed: Any) -> Any:
    """Four words as uint64; all arguments uint64, of which the low words count, of the seed both."""
    c0, c1, c2, c3 = block & LOW, position & LOW, stream & LOW, draft_step & LOW
    k0, k1 = seed & LOW, seed >> WORD
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (product1 >> WORD) ^ c1 ^ k0, product1 & LOW, (product0 >> WORD) ^ c3 ^ k1, product0 & LOW
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return c0, c1, c2, c3


@exact
def uniform_of(word: Any) -> Any:
    """float64 in (0, 1), exact."""
    return (np.float64(np.int64(word)) + HALF) * UNIT


@exact
def log(x: Any) -> Any:
    """Of a normal positive float64, off by an ulp or two."""
    bits = bits_of_double(x) + BELOW_ONE
    exponent = np.float64((bits >> MANTISSA_BITS) - BIAS)
    f = double_of_bits((bits & MANTISSA) + SQRT_HALF) - ONE
    s = f / (TWO + f)
    z = s * s
    series = T5 + z * (T6 + z * (T7 + z * (T8 + z * (T9 + z * T10))))
    series = z * (T1 + z * (T2 + z * (T3 + z * (T4 + z * series))))
    return exponent * LN2_HIGH + (TWO * s + (TWO * s * series + exponent * LN2_LOW))


@exact
def gumbel_of(word: Any) -> Any:
    """float32: the float64 variate, rounded. 1 - w has no rounding, for w is a multiple of 2^-33."""
    return np.float32(-log(-log(ONE - uniform_of(word))))
