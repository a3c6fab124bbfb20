"""torch's own OpenMP threads for compiled kernels: a second pool on the same cores would stand in the way of the first.

torch's threads go on looking for work a while after each operation, so others would get their cores only by halves.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch  # noqa: F401 - loads its OpenMP
from llvmlite import binding
from numba import types

from kernels.cpu.compiled import compiled_for_c

SYMBOLS = ("omp_get_thread_num", "omp_get_num_threads")
thread_num: Any = types.ExternalFunction(SYMBOLS[0], types.int32())
num_threads: Any = types.ExternalFunction(SYMBOLS[1], types.int32())


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


# What compiled code asks where there is no OpenMP: the one thread that there is.
_alone = tuple(ctypes.CFUNCTYPE(ctypes.c_int)(answer) for answer in (lambda: 0, lambda: 1))


class ThreadedKernel:
    """A function of a pointer to its arguments that every thread runs; `thread_num()` tells it which one it is.

    It may neither raise nor allocate.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._compiled: Any = None

    def __call__(self, arguments: Any, threads: int) -> None:
        """Run it with the arguments at this address, in so many threads; in one where torch has none to share."""
        library = openmp()
        if self._compiled is None:
            if library is None:
                for name, answer in zip(SYMBOLS, _alone, strict=True):
                    if not binding.address_of_symbol(name):
                        binding.add_symbol(name, ctypes.cast(answer, ctypes.c_void_p).value)
            self._compiled = compiled_for_c(self._function, (types.voidptr,))
        if library is None:
            self._compiled.ctypes(arguments)
        else:
            library.GOMP_parallel(self._compiled.address, arguments, threads, 0)
