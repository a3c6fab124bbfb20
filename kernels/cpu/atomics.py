"""Numbers that several threads read and write: int64 at addresses, every access in one order that all of them see."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

INT = ir.IntType(64)
SEQUENTIAL = "seq_cst"
ALIGN = 8


def _atomic(count: int, result: Any, generate: Callable[..., Any]) -> Any:
    """numba's intrinsic of an address and so many numbers."""
    signature = result(*[types.int64] * (1 + count))

    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], INT.as_pointer())
        made = generate(builder, place, *arguments[1:])
        return context.get_dummy_value() if result == types.void else made

    if count == 0:
        return intrinsic(lambda _context, _address: (signature, code))
    if count == 1:
        return intrinsic(lambda _context, _address, _number: (signature, code))
    return intrinsic(lambda _context, _address, _expected, _number: (signature, code))


def _compare_and_swap(builder: Any, place: Any, expected: Any, number: Any) -> Any:
    return builder.extract_value(builder.cmpxchg(place, expected, number, SEQUENTIAL, SEQUENTIAL), 1)


def _pause(_context: Any) -> Any:
    word, nothing = ir.IntType(32), ir.VoidType()
    is_arm, is_x86 = (platform.machine().lower() in names for names in (("aarch64", "arm64"), ("x86_64", "amd64")))

    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if is_x86:
            pause = ir.FunctionType(nothing, [])
            builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        elif is_arm:
            hint = ir.FunctionType(nothing, [word])
            called = cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint")
            builder.call(called, [ir.Constant(word, 1)])
        return context.get_dummy_value()

    return types.void(), code


load: Any = _atomic(0, types.int64, lambda builder, place: builder.load_atomic(place, "acquire", ALIGN))
store: Any = _atomic(
    1, types.void, lambda builder, place, number: builder.store_atomic(number, place, "release", ALIGN)
)
swap: Any = _atomic(
    1, types.int64, lambda builder, place, number: builder.atomic_rmw("xchg", place, number, SEQUENTIAL)
)
fetch_add: Any = _atomic(
    1, types.int64, lambda builder, place, number: builder.atomic_rmw("add", place, number, SEQUENTIAL)
)
compare_and_swap: Any = _atomic(2, types.boolean, _compare_and_swap)  # whether it was as expected
pause: Any = intrinsic(_pause)  # what a loop says that waits for another thread
