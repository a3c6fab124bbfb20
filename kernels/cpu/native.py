"""Compiled functions called as C calls them: numba's own call looks at every array, and costs what they compute."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from kernels.cpu.compiled import compiled, compiled_for_c


def _pointer(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


pointer: Any = intrinsic(_pointer)  # of an int64 address


@compiled
def floats(address: int, num_rows: int, width: int) -> Any:
    """[num_rows, width] float32."""
    return carray(pointer(address), (num_rows, width), np.float32)


@compiled
def integers(address: int, count: int) -> Any:
    """[count] int64."""
    return carray(pointer(address), (count,), np.int64)


class NativeKernel:
    """A function of int64, addresses and sizes. It may not raise; what it allocates it has to free."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._call: Callable[..., None] | None = None
        self._keeps: Any = None  # the code that is called

    def __call__(self, *numbers: int) -> None:
        if self._call is None:
            count = len(inspect.signature(self._function).parameters)
            self._keeps = compiled_for_c(self._function, (types.int64,) * count)
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(self._keeps.address)
        self._call(*numbers)
