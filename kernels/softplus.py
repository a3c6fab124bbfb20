"""log(1 + e^x) of float32."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x, power):
    """power: e^-|x|."""
    return tl.maximum(x, 0.0) + _log1p(power)


@triton.jit
def _log1p(x):
    """Of 0 to 1; where 1 + x has lost digits of x, what they are lost from tells how many."""
    rounded = 1.0 + x
    return tl.where(rounded == 1.0, x, tl.log(rounded) * (x / (rounded - 1.0)))
