"""What the elements of a weight are to a kernel: numbers, the bits of a float8, or words of eight codes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantized_weight import FLOAT8, QuantizedWeight


class Elements(NamedTuple):
    """A weight as kernels read it."""

    numbers: Tensor  # [out_features, in_features]; of codes [out_features, in_features / 8] int32
    scales: Tensor | None  # [out_features, groups]
    zeros: Tensor | None  # [out_features, groups]
    block_scales: Tensor | None  # [out_features, block_columns]
    bits: int  # of a number
    group_size: int | None  # columns that share a scale, or None where all do
    reading: str  # numbers, float8 bits (in int8), or a code of kernels/quantized_weight.py


def take_apart(weight: Tensor | QuantizedWeight) -> Elements:
    if not isinstance(weight, QuantizedWeight):
        return Elements(weight, None, None, None, 8 * weight.element_size(), None, "numbers")
    assert all(part.is_contiguous() for part in weight.tensors.values()) and weight.scales.dtype == torch.float32
    numbers: Tensor = weight.numbers
    reading: str = weight.code or "numbers"
    if weight.code is not None:
        numbers = numbers.view(torch.int32)
    if numbers.dtype == FLOAT8 and not converts_float8(numbers.device):
        numbers, reading = numbers.view(torch.int8), "float8 bits"
    scales, zeros, block_scales = weight.scales, weight.zeros, weight.block_scales
    return Elements(numbers, scales, zeros, block_scales, weight.number_bits, weight.shared_columns, reading)


@cache
def converts_float8(device: torch.device) -> bool:
    """Whether the device has instructions for it; Triton knows the type on no other GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.constexpr_function
def numbers_per_element(reading):
    return 8 if reading in ("int4", "fp4") else 1


@triton.jit
def as_factors(numbers, dtype: tl.constexpr, READING: tl.constexpr):
    """Numbers of 8 bits in the dtype of the rows, which holds them exactly."""
    if READING == "float8 bits":
        # Exponent and mantissa at a float32's places, whose exponents count from 120 further below.
        words = (numbers.to(tl.int32) << 20) & -0x78100000
        numbers = words.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    elif numbers.dtype == tl.float8e4nv and dtype == tl.bfloat16:  # by pairs; straight it would be one by one, and slow
        numbers = numbers.to(tl.float32)
    return numbers.to(dtype)


@triton.jit
def codes_in_pairs(words):
    """[FEATURES, n] -> [FEATURES, n / 4, 2, 2, 4], both int32: the codes of neighbours, from bits 0 and 16."""
    quarters = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12)) & 0x000F000F
    spans = tl.reshape(quarters, (words.shape[0], words.shape[1] // 4, 4, 2, 2))
    return tl.permute(spans, (0, 1, 3, 4, 2))  # as pack_codes has them: two bits of v, then words


@triton.jit
def halves(pairs, dtype: tl.constexpr):
    """[...] int32 -> [..., 2]: numbers whose 16 bits are the lower and the higher half."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(dtype, bitcast=True)


@triton.jit
def int4_as_factors(words, zeros, dtype: tl.constexpr):
    """[FEATURES, n] words and [FEATURES, 1] zero points -> [FEATURES, 8 n], exactly.

    A code becomes the last bits of a float so large that these count ones, which takes no conversion: they are slow.
    """
    pairs = codes_in_pairs(words)
    zeros = zeros.to(tl.int32)
    if dtype == tl.float32:
        codes = tl.join(pairs & 0xF, pairs >> 16) | 0x4B000000
        factors = codes.to(dtype, bitcast=True) - (zeros.to(dtype) + 8388608.0)[:, :, None, None, None, None]
    else:
        # Of two at once: taken one by one, or beside a zero point that is not one of two, they take twice the work.
        ONES: tl.constexpr = 0x64006400 if dtype == tl.float16 else 0x43004300
        terms = tl.broadcast_to((zeros * 0x00010001 + ONES)[:, :, None, None, None], pairs.shape)
        factors = halves(pairs | ONES, dtype) - halves(terms, dtype)
    return tl.reshape(factors, (words.shape[0], 8 * words.shape[1]))


@triton.jit
def fp4_as_factors(words, octets, dtype: tl.constexpr):
    """[FEATURES, n] words and [FEATURES, groups] of block_scales -> [FEATURES, 8 n], their products, exactly.

    Exponent and mantissa get the places of the dtype, whose exponents count from further below; so do those of the
    scale, from as much further above.
    """
    pairs, octets = codes_in_pairs(words), octets.to(tl.int32)
    FEATURES: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = octets.shape[1]
    if dtype == tl.float32:
        codes = tl.join(pairs & 0xF, pairs >> 16)
        numbers = ((codes & 8) << 28 | (codes & 7) << 22).to(dtype, bitcast=True)
        scales = (octets * 0x00100000 + 0x70000000).to(dtype, bitcast=True)
        spread = tl.broadcast_to(scales[:, :, None], (FEATURES, GROUPS, 8 * words.shape[1] // GROUPS))
        factors = numbers * tl.reshape(spread, numbers.shape)
    else:
        # As int4_as_factors, of two at once.
        EXPONENTS: tl.constexpr = 9 if dtype == tl.float16 else 6
        UNIT: tl.constexpr = 0x00800080 if dtype == tl.float16 else 0x00100010
        FIRST: tl.constexpr = 0 if dtype == tl.float16 else 0x70007000
        numbers = (pairs & 0x00080008) << 12 | (pairs & 0x00070007) << EXPONENTS
        scales = octets * UNIT + FIRST
        spread = tl.broadcast_to(scales[:, :, None], (FEATURES, GROUPS, 4 * words.shape[1] // GROUPS))
        factors = halves(numbers, dtype) * halves(tl.reshape(spread, pairs.shape), dtype)
    return tl.reshape(factors, (FEATURES, 8 * words.shape[1]))
