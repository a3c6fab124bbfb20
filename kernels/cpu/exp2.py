"""2^x of float32 in instructions that fit into vector lanes; numba's own exp is a call for each number."""

from __future__ import annotations

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
