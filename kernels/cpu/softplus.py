"""log(1 + e^x) of float32, in instructions that fit into vector lanes; numba's log is a call for each number."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compiled import vectorized
from kernels.cpu.exp2 import LOG2_E, exp2

NOTHING, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
# Of atanh(s) / s for s in [0, 1/3], by s^2: the next term is less than 2e-9 of the sum.
S16, S14, S12, S10 = np.float32(1 / 17), np.float32(1 / 15), np.float32(1 / 13), np.float32(1 / 11)
S8, S6, S4, S2 = np.float32(1 / 9), np.float32(1 / 7), np.float32(1 / 5), np.float32(1 / 3)


@vectorized
def softplus(x: Any) -> Any:
    """max(x, 0) + log(1 + p), p = e^-|x|, whose log is 2 atanh(p / (2 + p)): as exact for a small p as p is."""
    power = exp2(-abs(x) * LOG2_E)
    s = power / (TWO + power)
    z = s * s
    series = (((((((S16 * z + S14) * z + S12) * z + S10) * z + S8) * z + S6) * z + S4) * z + S2) * z + ONE
    return max(x, NOTHING) + TWO * s * series
