"""What the elements of a weight are to a kernel: numbers of the rows' dtype, or words of quantized ones."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import words
from kernels.quantized_weight import QuantizedWeight

INT8_ZERO: tl.constexpr = tl.constexpr(words.INT8_ZERO)


class Elements(NamedTuple):
    """A weight as kernels read it."""

    numbers: Tensor  # [out_features, in_features]; of a quantized one [out_features, words] int32
    scales: Tensor | None  # [out_features, groups]
    zeros: Tensor | None  # [out_features, groups]
    block_scales: Tensor | None  # [out_features, block_columns]
    in_features: int
    bits: int  # of a number
    group_size: int | None  # columns that share a scale, or None where all do
    reading: str  # dense, or QuantizedWeight.kind


def take_apart(weight: Tensor | QuantizedWeight) -> Elements:
    if not isinstance(weight, QuantizedWeight):
        return Elements(weight, None, None, None, weight.shape[1], 8 * weight.element_size(), None, "dense")
    assert all(part.is_contiguous() for part in weight.tensors.values()) and weight.scales.dtype == torch.float32
    assert weight.is_in_words, "kernels of a GPU read no other order"
    parts = (weight.numbers, weight.scales, weight.zeros, weight.block_scales)
    return Elements(*parts, weight.in_features, weight.number_bits, weight.shared_columns, weight.kind)


@triton.constexpr_function
def numbers_per_element(reading):
    return {"dense": 1, "int8": 4, "fp8": 4, "int4": 8, "fp4": 8}[reading]


@triton.jit
def halves(pairs, dtype: tl.constexpr):
    """[...] int32 -> [..., 2]: numbers whose 16 bits are the lower and the higher half."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(dtype, bitcast=True)


@triton.jit
def numbers_in_pairs(first, second):
    """[FEATURES, n] int32, twice -> [FEATURES, n / 4, 2, 4]: of words of 8 bits the pairs, in the order of inputs."""
    pairs = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1] // 4, 4, 2))
    return tl.permute(pairs, (0, 1, 3, 2))


@triton.jit
def int8_as_factors(words, dtype: tl.constexpr):
    """[FEATURES, n] words -> [FEATURES, 4 n], exactly.

    No conversion, which would be slow: as bits of a float the numbers from 0 to 255 count its smallest unit, 2**-133 of
    a bfloat16 and 2**-24 of a float16. No such float is large enough to make it 1, so two products do.
    """
    pairs = numbers_in_pairs(words, words >> 8) & 0x00FF00FF
    if dtype == tl.float32:
        numbers = tl.join(pairs & 0xFF, pairs >> 16) | 0x4B000000
        factors = numbers.to(dtype, bitcast=True) - (8388608.0 + INT8_ZERO)
    else:
        LARGEST: tl.constexpr = 2.0**15 if dtype == tl.float16 else 2.0**127
        REST: tl.constexpr = 2.0**9 if dtype == tl.float16 else 2.0**6
        factors = halves(pairs, dtype) * LARGEST * REST - INT8_ZERO
    return tl.reshape(factors, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def fp8_as_factors(words, dtype: tl.constexpr):
    """[FEATURES, n] words -> [FEATURES, 4 n], exactly: bfloat16 whose exponents count from 120 further below, times
    what they lack, or such float16, from 8.
    """
    # Masks of 32 bits that begin with a one are negative numbers: 0x87F087F0, 0x80F080F0, 0x80008000, 0xFFFF0000.
    second = (words << 4) & -0x7F0F7F10 | (words >> 4) & 0x07000700
    pairs = numbers_in_pairs(words & -0x780F7810, second)
    MISSING: tl.constexpr = 2.0**120
    if dtype == tl.float16:
        factors = halves(pairs & -0x7FFF8000 | (pairs & 0x07F007F0) << 3, dtype) * 2.0**8
    elif dtype == tl.float32:
        factors = tl.join(pairs << 16, pairs & -0x10000).to(dtype, bitcast=True) * MISSING
    else:
        factors = halves(pairs, dtype) * MISSING
    return tl.reshape(factors, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def codes_in_pairs(words):
    """[FEATURES, n] -> [FEATURES, n / 4, 2, 2, 4], both int32: the codes of neighbours, from bits 0 and 16."""
    quarters = tl.join(tl.join(words, words >> 8), tl.join(words >> 4, words >> 12)) & 0x000F000F
    spans = tl.reshape(quarters, (words.shape[0], words.shape[1] // 4, 4, 2, 2))
    return tl.permute(spans, (0, 1, 3, 4, 2))  # two bits of v, then words (kernels/words.py)


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
