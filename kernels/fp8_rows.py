"""kernels/reference/fp8_rows.py for other kernels: numbers to their bits, and rows of a cache to numbers.

By operations of whole numbers, so that a GPU without such numbers (compute capability 8.0, 8.6) has them, too. NaN, of
which a text has nothing left anyway, is read as 480, as on a CPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.fp8_rows import FP8
from kernels.weight_elements import halves


def in_octets(kv_cache: Tensor) -> Tensor:
    """A cache as a kernel writes it: numbers of 8 bits as uint8."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype == FP8 else kv_cache


def in_pairs(kv_cache: Tensor) -> Tensor:
    """A cache as a kernel reads it: two numbers of 8 bits as an int16, the first in its lower half."""
    return kv_cache.view(torch.int16) if kv_cache.dtype == FP8 else kv_cache


@triton.jit
def stored(numbers, factor, dtype: tl.constexpr):
    """Numbers as a cache of dtype takes them; of uint8 float8_e4m3fn's bits of their products with factor."""
    return _octets(numbers.to(tl.float32) * factor) if dtype == tl.uint8 else numbers.to(dtype)


@triton.jit
def _octets(numbers):
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448.0
    # Exponents count from 120 further below; half a unit of the last bit kept, less where that is even.
    normal = (magnitude - 0x3C000000 + 0x7FFFF + (magnitude >> 20 & 1)) >> 20
    # Below 2**-6 all have one unit, 2**-9: that of the last bit of 2**14, to which they are added.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(is_nan, 0x7F, tl.where(magnitude < 0x3C800000, small, normal))
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def load_fp8_rows(kv_ptr, slots, is_key, first, dim, BLOCK: tl.constexpr, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """[BLOCK_N, BLOCK] of dtype, exactly: `dim` columns from `first` on of rows of WIDTH numbers, and zeros.

    kv_ptr: to pairs. All counts are even.
    """
    pair = tl.arange(0, BLOCK // 2)
    pairs = tl.load(
        kv_ptr + slots.to(tl.int64)[:, None] * (WIDTH // 2) + (first // 2 + pair)[None, :],
        mask=is_key[:, None] & (pair < dim // 2)[None, :],
        other=0,
    ).to(tl.int32)
    spread = pairs & 0xFF | (pairs & 0xFF00) << 8  # octets at the beginning of either half
    signs, magnitudes = spread & 0x00800080, spread & 0x007F007F
    # Bits of a bfloat16, whose exponents count from 120 further below, or of a float16, from 8.
    MISSING: tl.constexpr = 2.0**8 if dtype == tl.float16 else 2.0**120
    if dtype == tl.float32:
        bits = signs << 8 | magnitudes << 4
        numbers = tl.join(bits << 16, bits & -0x10000).to(dtype, bitcast=True) * MISSING
    else:
        numbers = halves(signs << 8 | magnitudes << (7 if dtype == tl.float16 else 4), dtype) * MISSING
    return tl.reshape(numbers, (pairs.shape[0], BLOCK))
