"""Numbers that several threads read and write: int64 at addresses, in an order that all of them see."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu.native import call_llvm

INT, WORD = ir.IntType(64), ir.IntType(32)
ALIGN = 8
ORDER = "seq_cst"


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT.as_pointer())


def _load(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(builder, arguments[0]), "acquire", ALIGN)

    return types.int64(types.int64), generate


def _store(_context: Any, _address: Any, _number: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _place(builder, arguments[0]), "release", ALIGN)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _fetch_add(_context: Any, _address: Any, _number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _place(builder, arguments[0]), arguments[1], ORDER)

    return types.int64(types.int64, types.int64), generate


def _compare_and_swap(_context: Any, _address: Any, _expected: Any, _number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, expected, number = arguments
        return builder.extract_value(builder.cmpxchg(_place(builder, address), expected, number, ORDER, ORDER), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


def _pause(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif machine in ("aarch64", "arm64"):
            call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(WORD, 1)])  # yield
        return context.get_dummy_value()

    return types.void(), generate


load: Any = intrinsic(_load)  # of an address, as all of these
store: Any = intrinsic(_store)
fetch_add: Any = intrinsic(_fetch_add)  # what it was before
compare_and_swap: Any = intrinsic(_compare_and_swap)  # whether it was as expected, and now is the number
pause: Any = intrinsic(_pause)  # says that a loop waits for another thread
