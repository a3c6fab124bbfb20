"""AMX, the matrix unit of newer x86 CPUs: sums of products of bfloat16 in registers that hold a tile each.

An output is one sum over its inputs, 32 of them at a time, in an order that the instruction fixes (TDPBF16PS in Intel's
Intrinsics Guide), for one row as for sixteen: a row's bits are its own here too. They are others than those of vector
lanes (kernels/cpu/multiply_add.py), so a machine that has the unit uses it for any number of rows.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.native import BYTE, call_llvm, prefetch
from kernels.cpu.panels import LANES, has_feature
from kernels.cpu.vectors import INT, WORD, number

ROWS, PAIRS = 16, 16  # of a tile: rows of a launch, or of their sums; pairs of inputs
INPUTS = 2 * PAIRS  # of a step
LINE = 4 * LANES  # bytes of every row of a tile: INPUTS of a row, or a pair of each of LANES outputs, or sums
SUMS = 4  # tiles of them, which are the first
INPUTS_AT, WEIGHTS = 4, (5, 6, 7)  # tiles of a step's inputs, and of its weights
VOID = ir.VoidType()


@cache
def has_amx() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 and Linux lets this process: it lends their registers on request."""
    is_known = sys.platform == "linux" and platform.machine() == "x86_64"
    if not (is_known and has_feature("amx-bf16") and has_feature("avx512f")):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    refused: int = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)
    return not refused


def _tiles(builder: Any, name: str, *arguments: Any) -> None:
    """An instruction on tiles, whose numbers are constants."""
    numbers = [number(value, BYTE) if isinstance(value, int) else value for value in arguments]
    call_llvm(builder, f"llvm.x86.{name}", VOID, numbers)


def _address(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, BYTE.as_pointer())


def _configure(_context: Any, _num_rows: Any) -> Any:
    """Has this thread's tiles hold so many rows (those of weights PAIRS), as LDTILECFG reads it from memory."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        palette, widths, rows_of_tiles = [1, *[0] * 15], [LINE, 0] * 8, 48
        numbers = [*palette, *widths, *[0] * 16, *[0] * SUMS, 0, *[PAIRS] * len(WEIGHTS), *[0] * 8]
        kind = ir.ArrayType(BYTE, len(numbers))
        place: Any = cgutils.alloca_once_value(  # type: ignore[no-untyped-call]
            builder, ir.Constant(kind, bytearray(numbers))
        )
        rows = builder.trunc(arguments[0], BYTE)
        for tile in (*range(SUMS), INPUTS_AT):
            at = builder.gep(place, [number(0, WORD), number(rows_of_tiles + tile, WORD)])
            builder.store(rows, at)
        _tiles(builder, "ldtilecfg", builder.bitcast(place, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _release(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        _tiles(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _multiply(
    _context: Any,
    is_added: Any,  # to what `out` holds; a constant, as the next
    ahead: Any,  # bytes of a panel that are asked for before they are read; 0: it lies in a cache
    num_vectors: Any,  # of LANES outputs, at most SUMS
    out: Any,  # addresses, as the next two
    rows: Any,  # as many as configured
    panel: Any,
    row_bytes: Any,  # from row to row
    steps: Any,  # of INPUTS; at least one
) -> Any:
    """out[row, output] = the products of the rows with a panel of num_vectors vectors of outputs, float32.

    Rows and the panel's inputs are bfloat16; `out` has as many columns as the panel has outputs.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        out, rows, panel, row_bytes, steps = arguments[3:]
        vectors, width, add = range(num_vectors.literal_value), LINE * num_vectors.literal_value, builder.add
        sums = [_address(builder, add(out, number(LINE * vector))) for vector in vectors]
        for vector in vectors:
            if is_added.literal_value:
                _tiles(builder, "tileloadd64", vector, sums[vector], number(width))
            else:
                _tiles(builder, "tilezero", vector)
        before = builder.block
        body, behind = builder.append_basic_block("steps"), builder.append_basic_block("behind")
        builder.branch(body)
        builder.position_at_end(body)
        places = _step, inputs, weights = [builder.phi(INT) for _ in range(3)]
        _tiles(builder, "tileloadd64", INPUTS_AT, _address(builder, inputs), row_bytes)
        for vector in vectors:
            line, loaded = add(weights, number(LINE * vector)), WEIGHTS[vector % len(WEIGHTS)]
            _tiles(builder, "tileloadd64", loaded, _address(builder, line), number(width))
            for pair in range(PAIRS if ahead.literal_value else 0):
                prefetch(builder, add(line, number(ahead.literal_value + width * pair)))
            _tiles(builder, "tdpbf16ps", vector, INPUTS_AT, loaded)
        following = [add(place, number(length)) for place, length in zip(places, (1, LINE, width * PAIRS), strict=True)]
        for place, first, later in zip(places, (number(0), rows, panel), following, strict=True):
            place.add_incoming(first, before)
            place.add_incoming(later, body)
        builder.cbranch(builder.icmp_signed("<", following[0], steps), body, behind)
        builder.position_at_end(behind)
        for vector in vectors:
            _tiles(builder, "tilestored64", vector, sums[vector], number(width))
        return context.get_dummy_value()

    return types.void(is_added, ahead, num_vectors, *[types.int64] * 5), generate


configure: Any = intrinsic(_configure)
release: Any = intrinsic(_release)  # all tiles: a thread without any is cheaper to suspend
multiply_tiles: Any = intrinsic(prefer_literal=True)(_multiply)
