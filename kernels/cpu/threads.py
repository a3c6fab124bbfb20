"""torch's own OpenMP threads for compiled kernels: a second pool on the same cores would stand in the way of the first.

torch's threads go on looking for work a while after each operation, so others would get their cores only by halves.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch  # noqa: F401 - loads its OpenMP
from llvmlite import binding
from numba import types

SYMBOLS = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
thread_num: Any = types.ExternalFunction(SYMBOLS[0], types.int32())
num_threads: Any = types.ExternalFunction(SYMBOLS[1], types.int32())
barrier: Any = types.ExternalFunction(SYMBOLS[2], types.void())  # where every thread waits for the others


@cache
def openmp() -> Any | None:
    """The OpenMP library that torch computes with; None where there is none that runs a function as GNU's does."""
    if sys.platform == "win32":
        return None
    library = ctypes.CDLL(None)  # what is loaded, in the order in which torch finds it: a preloaded library comes first
    if not all(hasattr(library, name) for name in (*SYMBOLS, "GOMP_parallel")):
        return None
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    for name in SYMBOLS:
        binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return library


def link_threads() -> None:
    """Let compiled code find the functions above; without OpenMP they speak of the one thread that there is."""
    if openmp() is None:
        for name, answer in zip(SYMBOLS, _alone, strict=True):
            if not binding.address_of_symbol(name):
                binding.add_symbol(name, ctypes.cast(answer, ctypes.c_void_p).value)


_alone = tuple(ctypes.CFUNCTYPE(ctypes.c_int)(answer) for answer in (lambda: 0, lambda: 1, lambda: 0))
