"""Exponentials as powers of two, which a GPU computes: e**x = 2**(x * LOG2_E)."""

from __future__ import annotations

import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
