"""One kind of integer for compiled functions."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled


@compiled
def wide(number: int) -> int:
    """An int64 of what an array or a constant gave: numba compiles a function once for every kind of integer."""
    return int(np.int64(number))
