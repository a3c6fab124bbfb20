"""2^x, tanh and what gelu needs of float32, in instructions that fit into vector lanes.

numba's own are a call for each number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.cpu.bits import float_of_bits
from kernels.cpu.compiled import vectorized

LOG2_E = np.float32(1.4426950408889634)
LOWEST = np.float32(-126.0)  # powers below that of the smallest normal number are this one
HIGHEST = np.float32(127.0)
HALF = np.float32(0.5)
# Of 2^f for f in [-0.5, 0.5], from the highest power down: Cephes' exp2f; off by less than 2e-7 of the result.
P6, P5, P4 = np.float32(1.535336188319500e-4), np.float32(1.339887440266574e-3), np.float32(9.618437357674640e-3)
P3, P2, P1 = np.float32(5.550332471162809e-2), np.float32(2.402264791363012e-1), np.float32(6.931472028550421e-1)
ONE = np.float32(1.0)
BIAS, MANTISSA = np.int32(127), np.int32(23)  # of a float32's exponent, and the bits behind it


@vectorized
def exp2(x: Any) -> Any:
    x = min(max(x, LOWEST), HIGHEST)
    whole = np.floor(x + HALF)
    f = x - whole
    power = ((((((P6 * f + P5) * f + P4) * f + P3) * f + P2) * f + P1) * f) + ONE
    scale = float_of_bits(np.int32((np.int32(whole) + BIAS) << MANTISSA))
    return power * scale


SMALL = np.float32(0.625)  # below it a quotient of powers of e would lose what is small
TWO = np.float32(2.0)
# Of tanh(x) / x - 1 for small x, by x^2, from the highest power down: Cephes' tanhf.
T5, T4, T3 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
T2, T1 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)


@vectorized
def tanh(x: Any) -> Any:
    square, size = x * x, abs(x)
    small = ((((T5 * square + T4) * square + T3) * square + T2) * square + T1) * square * x + x
    large = ONE - TWO / (exp2(TWO * LOG2_E * size) + ONE)
    return small if size < SMALL else (large if x > np.float32(0.0) else -large)


GELU_LINEAR = np.float32(2.0 * math.sqrt(2.0 / math.pi))
GELU_CUBIC = np.float32(0.044715) * GELU_LINEAR


@vectorized
def gelu_power(x: Any) -> Any:
    """t of gelu by tanh, which is x / (1 + e^-t): twice what it takes the tanh of."""
    return (GELU_CUBIC * x * x + GELU_LINEAR) * x
