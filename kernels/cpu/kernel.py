"""Compiled functions called as C calls them: numba's own call looks at every array, and costs what they compute."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types

from kernels.cpu.compiled import compiled_for_c
from kernels.cpu.threads import Team
from kernels.cpu.under_way import current


def arguments_of(*names: str) -> np.dtype[Any]:
    """A record of int64 fields: what a kernel takes."""
    return np.dtype([(name, np.int64) for name in names])


@cache
def bits_of(number: float) -> int:
    """A float32 as such a record holds it."""
    return int(np.float32(number).view(np.int32))


class Kernel:
    """A function of a pointer to its arguments, addresses and sizes, that does one part of `num_parts`.

    Parts are done in any order and by any thread, whose number tells which room for intermediate results is its own.
    It may neither raise nor allocate.
    """

    def __init__(self, function: Callable[[Any, int, int, int], None], arguments: np.dtype[Any]) -> None:
        self._function = function
        self._type = ctypes.c_int64 * len(arguments.names or ())
        self._count = len(arguments.names or ())
        self._compiled: Any = None  # and its call from Python

    @property
    def address(self) -> int:
        """For other kernels to call it (native.call)."""
        address: int = self._address_and_call()[0]
        return address

    def _address_and_call(self) -> Any:
        if self._compiled is None:
            compiled = compiled_for_c(self._function, (types.voidptr, *[types.int64] * 3))
            self._compiled = compiled.address, compiled.ctypes
        return self._compiled

    def __call__(self, *numbers: int, parts: int = 1) -> None:
        """Run in so many parts, or be written down (recording.py)."""
        assert len(numbers) == self._count
        address, call = self._address_and_call()
        arguments, recording = self._type(*numbers), current()
        if recording is not None:
            recording.add_kernel(address, arguments, parts)
        elif parts == 1:
            call(ctypes.addressof(arguments), 0, 1, 0)
        else:
            Team([(address, arguments, parts)], torch.get_num_threads())()
