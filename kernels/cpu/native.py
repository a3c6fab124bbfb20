"""What lies outside compiled functions: memory and functions at addresses, and LLVM's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from kernels.cpu.compiled import compiled

BYTE = ir.IntType(8)
CACHE_LINE = 64  # bytes
NUM_BYTES = 4  # of a float32
FIRST_CACHE, SECOND_CACHE = 3, 2  # of a core, in LLVM's numbers


def _pointer(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


def _call(_context: Any, _function: Any, _address: Any, numbers: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        anything, number = BYTE.as_pointer(), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [anything, *[number] * numbers.count])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        values = [builder.extract_value(arguments[2], index) for index in range(numbers.count)]
        builder.call(function, [builder.inttoptr(arguments[1], anything), *values])
        return context.get_dummy_value()

    given = types.UniTuple(types.int64, numbers.count)  # type: ignore[no-untyped-call]
    return types.void(types.int64, types.int64, given), generate


def call_llvm(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Of one of LLVM's own functions, in what an intrinsic generates."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def _touch(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.IntType(64)
        # Compilers leave out what nobody uses, but not what other threads may have a part in; atomics.load would have
        # what follows wait for it on some CPUs.
        builder.load_atomic(builder.inttoptr(arguments[0], kind.as_pointer()), "monotonic", kind.width // 8)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def prefetch(builder: Any, address: Any, cache: int = FIRST_CACHE) -> None:
    """In what an intrinsic generates."""
    word, read, data = ir.IntType(32), 0, 1
    hints = [ir.Constant(word, value) for value in (read, cache, data)]
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.inttoptr(address, BYTE.as_pointer()), *hints])


def _ask(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0], SECOND_CACHE)
        return context.get_dummy_value()

    return types.void(types.int64), generate


pointer: Any = intrinsic(_pointer)  # of an int64 address
touch: Any = intrinsic(_touch)  # 8 bytes at an address, a multiple of 8, are read for nothing but to have them near
ask: Any = intrinsic(_ask)  # the second cache for the line of an address, which need not be anybody's
# Of a function at an address: an address, and a tuple of numbers (a kernel's are part, num_parts and thread).
call: Any = intrinsic(_call)


@compiled
def floats(address: int, num_rows: int, width: int) -> Any:
    """[num_rows, width] float32."""
    return carray(pointer(address), (num_rows, width), np.float32)


@compiled
def integers(address: int, count: int) -> Any:
    """[count] int64."""
    return carray(pointer(address), (count,), np.int64)
