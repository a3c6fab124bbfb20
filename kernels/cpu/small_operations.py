"""Torch's elementwise operations and copies, compiled: what a recorded computation asks for between its kernels.

A call of torch costs more than a few hundred numbers, and the threads part for it. Operands are tensors of any strides
that broadcast to the result; of floats there is only what rounds the same in float64 and then in their own type.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import exact
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import pointer

NUM_DIMS = 4
INTEGERS = {torch.int64: 0, torch.int32: 1, torch.bool: 2}  # how the compiled functions know them
FLOATS = {torch.float64: 0, torch.float32: 1}
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # numbers of so many bytes that nobody computes with


class Operation(enum.IntEnum):
    ADD, SUB, MUL, DIV = range(4)
    GE, GT, LE, LT, EQ, NE = range(4, 10)
    AND, OR, XOR = range(10, 13)
    CLAMP = 13  # of the first operand, between the others
    CONVERT = 14


# As plain numbers, of which numba makes constants.
ADD, SUB, MUL, DIV, GE, GT, LE, LT, EQ, NE, AND, OR, XOR, CLAMP, CONVERT = (int(operation) for operation in Operation)


def _of_tensor(name: str) -> list[str]:
    return [name, *(f"{name}_{dim}" for dim in range(NUM_DIMS))]  # its address, and strides in elements


SIZES = [f"size_{dim}" for dim in range(NUM_DIMS)]
Computing = arguments_of(
    *("operation", *SIZES),
    *(name for tensor in ("out", "a", "b", "c") for name in _of_tensor(tensor)),
    *("out_kind", "a_kind", "b_kind", "c_kind"),
)
# condition 0: always the first
Choosing = arguments_of(*SIZES, *(name for tensor in ("out", "condition", "a", "b") for name in _of_tensor(tensor)))


@exact
def integer_at(address: Any, place: Any, kind: Any) -> Any:
    if kind == 0:
        return carray(pointer(address + 8 * place), (1,), np.int64)[0]
    if kind == 1:
        return np.int64(carray(pointer(address + 4 * place), (1,), np.int32)[0])
    return np.int64(carray(pointer(address + place), (1,), np.uint8)[0])


@exact
def float_at(address: Any, place: Any, kind: Any) -> Any:
    if kind == 0:
        return carray(pointer(address + 8 * place), (1,), np.float64)[0]
    return np.float64(carray(pointer(address + 4 * place), (1,), np.float32)[0])


@exact
def store_integer(address: Any, place: Any, kind: Any, value: Any) -> None:
    if kind == 0:
        carray(pointer(address + 8 * place), (1,), np.int64)[0] = value
    elif kind == 1:
        carray(pointer(address + 4 * place), (1,), np.int32)[0] = np.int32(value)
    else:
        carray(pointer(address + place), (1,), np.uint8)[0] = np.uint8(value)


@exact
def store_float(address: Any, place: Any, kind: Any, value: Any) -> None:
    if kind == 0:
        carray(pointer(address + 8 * place), (1,), np.float64)[0] = value
    else:
        carray(pointer(address + 4 * place), (1,), np.float32)[0] = np.float32(value)


@exact
def compared(operation: Any, a: Any, b: Any) -> Any:
    if operation == GE:
        return a >= b
    if operation == GT:
        return a > b
    if operation == LE:
        return a <= b
    if operation == LT:
        return a < b
    return a == b if operation == EQ else a != b


@exact
def arithmetic(operation: Any, a: Any, b: Any) -> Any:
    if operation == ADD:
        return a + b
    return a - b if operation == SUB else a * b


@exact
def integer_of(operation: Any, a: Any, b: Any, c: Any, out_kind: Any) -> Any:
    if operation <= MUL:
        return arithmetic(operation, a, b)
    if operation == AND:
        return a & b
    if operation == OR:
        return a | b
    if operation == XOR:
        return a ^ b
    if operation == CLAMP:
        return min(max(a, b), c)
    if operation == CONVERT:
        return np.int64(a != 0) if out_kind == 2 else a
    return np.int64(compared(operation, a, b))


@exact
def float_of(operation: Any, a: Any, b: Any) -> Any:
    if operation <= MUL:
        return arithmetic(operation, a, b)
    return a / b if operation == DIV else a  # CONVERT


@cache
def computing(of_floats: bool, to_floats: bool) -> Kernel:
    """Whether the operands are floats, and whether the result is."""

    def compute(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        r = carray(arguments, 1, Computing)[0]
        for i in range(r.size_0):
            for j in range(r.size_1):
                for k in range(r.size_2):
                    out = i * r.out_0 + j * r.out_1 + k * r.out_2
                    a_place = i * r.a_0 + j * r.a_1 + k * r.a_2
                    b_place = i * r.b_0 + j * r.b_1 + k * r.b_2
                    c_place = i * r.c_0 + j * r.c_1 + k * r.c_2
                    for n in range(r.size_3):
                        place, at, beside = out + n * r.out_3, a_place + n * r.a_3, b_place + n * r.b_3
                        if of_floats:
                            x, y = float_at(r.a, at, r.a_kind), float_at(r.b, beside, r.b_kind)
                            if to_floats:
                                store_float(r.out, place, r.out_kind, float_of(r.operation, x, y))
                            else:
                                store_integer(r.out, place, r.out_kind, np.int64(compared(r.operation, x, y)))
                        else:
                            p, q = integer_at(r.a, at, r.a_kind), integer_at(r.b, beside, r.b_kind)
                            if to_floats and r.out_kind == 0:
                                store_float(r.out, place, r.out_kind, np.float64(p))
                            elif to_floats:  # rounded once
                                carray(pointer(r.out + 4 * place), (1,), np.float32)[0] = np.float32(p)
                            else:
                                end = integer_at(r.c, c_place + n * r.c_3, r.c_kind)
                                value = integer_of(r.operation, p, q, end, r.out_kind)
                                store_integer(r.out, place, r.out_kind, value)

    return Kernel(compute, Computing)


@cache
def choosing(element: Any) -> Kernel:
    size = np.dtype(element).itemsize

    def choose(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        r = carray(arguments, 1, Choosing)[0]
        for i in range(r.size_0):
            for j in range(r.size_1):
                for k in range(r.size_2):
                    out = r.out + size * (i * r.out_0 + j * r.out_1 + k * r.out_2)
                    first = r.a + size * (i * r.a_0 + j * r.a_1 + k * r.a_2)
                    second = r.b + size * (i * r.b_0 + j * r.b_1 + k * r.b_2)
                    condition = r.condition + i * r.condition_0 + j * r.condition_1 + k * r.condition_2
                    if r.condition == 0 and r.out_3 == 1 and r.a_3 == 1:
                        carray(pointer(out), (r.size_3,), element)[:] = carray(pointer(first), (r.size_3,), element)
                        continue
                    for n in range(r.size_3):
                        holds = True
                        if r.condition != 0:
                            holds = carray(pointer(condition + n * r.condition_3), (1,), np.uint8)[0] != 0
                        source = first + size * n * r.a_3 if holds else second + size * n * r.b_3
                        value = carray(pointer(source), (1,), element)[0]
                        carray(pointer(out + size * n * r.out_3), (1,), element)[0] = value

    return Kernel(choose, Choosing)


def compute(operation: Operation, out: Tensor, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> None:
    """out = the operation of what broadcasts to it; an operand that there is none of is not looked at."""
    operands = [_placed(own, out) for own in (out, a, a if b is None else b, a if c is None else c)]
    of_floats, to_floats = a.dtype in FLOATS, out.dtype in FLOATS
    kinds = [{**INTEGERS, **FLOATS}[own.dtype] for own in operands]
    strides = [number for own in operands for number in (own.data_ptr(), *own.stride())]
    computing(of_floats, to_floats)(int(operation), *operands[0].shape, *strides, *kinds)


def choose(out: Tensor, a: Tensor, b: Tensor | None = None, condition: Tensor | None = None) -> None:
    """out = a where the condition holds, b elsewhere; without a condition, a."""
    absent = (0,) * (NUM_DIMS + 1)
    a_placed, b_placed = _placed(a, out), _placed(a if b is None else b, out)
    condition_numbers: Sequence[int] = absent
    if condition is not None:
        own = _placed(condition, out)
        condition_numbers = (own.data_ptr(), *own.stride())
    placed = _placed(out, out)
    choosing(RAW[out.element_size()])(
        *placed.shape,
        *(placed.data_ptr(), *placed.stride()),
        *condition_numbers,
        *(a_placed.data_ptr(), *a_placed.stride()),
        *(b_placed.data_ptr(), *b_placed.stride()),
    )


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A view of the shape of `like`, with NUM_DIMS dimensions."""
    view = tensor.expand(like.shape)
    for _ in range(NUM_DIMS - view.dim()):
        view = view.unsqueeze(0)
    return view
