"""Vectors of LANES outputs in LLVM's terms: what kinds of numbers, and shuffles of them, are written in."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.cpu.native import call_llvm
from kernels.cpu.panels import LANES

INT, WORD, BYTE, FLOAT, HALF = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType(), ir.HalfType()
FLOATS, WORDS, BYTES, HALVES = (ir.VectorType(kind, LANES) for kind in (FLOAT, WORD, BYTE, HALF))
HALF_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
FUSED = f"llvm.fma.v{LANES}f32"


def number(value: int, kind: Any = INT) -> Any:
    return ir.Constant(kind, value)


def every_lane(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    alone = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, number(0, WORD))
    return builder.shuffle_vector(alone, ir.Constant(kind, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def fused_multiply_add(builder: Any, factor: Any, factors: Any, total: Any) -> Any:
    return call_llvm(builder, FUSED, FLOATS, [every_lane(builder, factor), factors, total])
