"""Compiled functions called as C calls them: numba's own call looks at every array, and costs what they compute."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from kernels.cpu.compiled import compiled_for_c
from kernels.cpu.threads import link_threads, openmp
from kernels.cpu.under_way import current


def arguments_of(*names: str) -> np.dtype[Any]:
    """A record of int64 fields: what a kernel takes."""
    return np.dtype([(name, np.int64) for name in names])


class Kernel:
    """A function of a pointer to its arguments, addresses and sizes, that every thread runs to do its part.

    `thread_num()` tells it which one it is of `num_threads()`. It may neither raise nor allocate.
    """

    def __init__(self, function: Callable[[Any], None], arguments: np.dtype[Any]) -> None:
        self._function = function
        self._type = ctypes.c_int64 * len(arguments.names or ())
        self._count = len(arguments.names or ())
        self._compiled: Any = None  # and its call from Python

    def __call__(self, *numbers: int, threads: int = 1) -> None:
        """Run in so many threads, in one where torch has none to share; or be written down (recording.py)."""
        if self._compiled is None:
            link_threads()
            compiled = compiled_for_c(self._function, (types.voidptr,))
            self._compiled = compiled.address, compiled.ctypes
        assert len(numbers) == self._count
        address, call = self._compiled
        arguments, recording = self._type(*numbers), current()
        if recording is not None:
            recording.add_kernel(address, arguments, threads)
        elif threads == 1 or (library := openmp()) is None:
            call(ctypes.addressof(arguments))
        else:
            library.GOMP_parallel(address, arguments, threads, 0)
