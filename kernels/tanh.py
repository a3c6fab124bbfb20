"""tanh of float32, which Triton's language lacks, and what gelu by tanh needs instead of it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

from kernels.exp2 import LOG2_E

GELU_LINEAR: tl.constexpr = tl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
GELU_CUBIC: tl.constexpr = tl.constexpr(0.044715 * GELU_LINEAR.value)


@triton.jit
def tanh(x):
    """Near zero by Cephes' polynomial, where 1 - 2 / (e^2x + 1) loses its digits."""
    z = x * x
    p = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(z, p, -5.37397155531e-2)
    p = tl.fma(z, p, 1.33314422036e-1)
    p = tl.fma(z, p, -3.33332819422e-1)
    return tl.where(tl.abs(x) < 0.625, tl.fma(p * z, x, x), 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def gelu_power(x):
    """t of gelu by tanh, which is x / (1 + e^-t): twice what it takes the tanh of."""
    return x * (GELU_CUBIC * x * x + GELU_LINEAR)
