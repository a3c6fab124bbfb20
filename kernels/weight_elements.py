"""What the elements of a weight are to a kernel: numbers, the bits of a float8, or two codes of 4 bits each."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import quantized_weight
from kernels.quantized_weight import FLOAT8, QuantizedWeight

SPAN: tl.constexpr = tl.constexpr(quantized_weight.SPAN)
HALF_SPAN: tl.constexpr = tl.constexpr(quantized_weight.SPAN // 2)
ZERO: tl.constexpr = tl.constexpr(quantized_weight.ZERO)


class Elements(NamedTuple):
    """A weight as kernels read it."""

    numbers: Tensor  # [out_features, in_features]; of codes half as wide
    scales: Tensor | None  # [out_features, groups]
    zeros: Tensor | None  # [out_features, groups]
    bits: int  # of a number
    group_size: int | None  # columns that share a scale, or None where all do
    reading: str  # numbers, float8 bits (in int8), or a code of kernels/quantized_weight.py


def take_apart(weight: Tensor | QuantizedWeight) -> Elements:
    if not isinstance(weight, QuantizedWeight):
        return Elements(weight, None, None, 8 * weight.element_size(), None, "numbers")
    assert all(part.is_contiguous() for part in weight.tensors.values()) and weight.scales.dtype == torch.float32
    numbers: Tensor = weight.numbers
    reading: str = weight.code or "numbers"
    if numbers.dtype == FLOAT8 and not converts_float8(numbers.device):
        numbers, reading = numbers.view(torch.int8), "float8 bits"
    return Elements(numbers, weight.scales, weight.zeros, weight.number_bits, weight.shared_columns, reading)


@cache
def converts_float8(device: torch.device) -> bool:
    """Whether the device has instructions for it; Triton knows the type on no other GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.constexpr_function
def numbers_per_element(reading):
    return 2 if reading in ("int4", "fp4") else 1


@triton.jit
def columns_of_step(BLOCK_K: tl.constexpr, READING: tl.constexpr):
    """[1, n], the inputs of a step's weights: all BLOCK_K; of codes those in the lower bits of each byte."""
    if numbers_per_element(READING) == 1:
        columns = tl.arange(0, BLOCK_K)
    else:
        places = tl.arange(0, BLOCK_K // 2)
        columns = places // HALF_SPAN * SPAN + places % HALF_SPAN
    return columns[None, :]


@triton.jit
def as_factors(numbers, dtype: tl.constexpr, READING: tl.constexpr):
    """Numbers of 8 bits in the dtype of the rows, which holds them exactly."""
    if READING == "float8 bits":
        # Exponent and mantissa at a float32's places, whose exponents count from 120 further below.
        words = (numbers.to(tl.int32) << 20) & -0x78100000
        numbers = words.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return numbers.to(dtype)


@triton.jit
def int4_as_factors(codes, zeros, dtype: tl.constexpr):
    """What codes [FEATURES, n] are more than zero points [FEATURES, 1], exactly.

    A code becomes the last bits of a float so large that these count ones, which takes no conversion: they are slow.
    """
    if dtype == tl.float32:
        factors = (codes.to(tl.int32) | 0x4B000000).to(dtype, bitcast=True) - (zeros.to(dtype) + 8388608.0)
    elif dtype == tl.float16:
        factors = (codes.to(tl.int16) | 0x6400).to(dtype, bitcast=True) - (zeros.to(dtype) + 1024.0)
    else:
        factors = (codes.to(tl.int16) | 0x4300).to(dtype, bitcast=True) - (zeros.to(dtype) + 128.0)
    return factors


@triton.jit
def fp4_as_factors(codes, dtype: tl.constexpr):
    """Twice the numbers: their bits at the places of the dtype, whose exponents count from further below."""
    if dtype == tl.float32:
        words = codes.to(tl.int32)
        factors = (((words & 7) << 22) | ((words & 8) << 28)).to(dtype, bitcast=True) * 2.0**127
    elif dtype == tl.float16:
        words = codes.to(tl.int16)
        factors = (((words & 7) << 9) | ((words & 8) << 12)).to(dtype, bitcast=True) * 2.0**15
    else:
        words = codes.to(tl.int16)
        factors = (((words & 7) << 6) | ((words & 8) << 12)).to(dtype, bitcast=True) * 2.0**127
    return factors


@triton.jit
def codes_as_factors(codes, zeros, dtype: tl.constexpr, READING: tl.constexpr):
    return int4_as_factors(codes, zeros, dtype) if READING == "int4" else fp4_as_factors(codes, dtype)
