"""Counter-based noise inside Triton kernels; kernels/reference/philox.py is the definition, tl.philox the generator.

Words are the reference's, bit for bit. A uniform variate is the reference's float64. A Gumbel variate is made in
float32 by additions, multiplications and divisions that every machine rounds alike, so launch kernels that use it with
`enable_fp_fusion=False`: otherwise the compiler may fuse one kernel's operations and not another's, and a token's noise
would depend on which kernel the batch needed. It is within 2**-22 * max(1, |g|) of the float64 formula, always finite.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF_BITS: tl.constexpr = tl.constexpr(0x3F3504F3)  # of float32 sqrt(1/2)
BELOW_HALF: tl.constexpr = tl.constexpr(0x4AFB0CCC)  # 1 - sqrt(1/2) as a word


@triton.jit
def random_words(seed, position, stream, draft_step, blocks):
    """Four lanes of uint32 words of blocks (int32); seed: int64, of the scalars behind it the low words count."""
    # Not .to(): a launch's argument of 1 is a constant to the compiler, and has no such method.
    position, stream, draft_step = tl.cast(position, tl.int32), tl.cast(stream, tl.int32), tl.cast(draft_step, tl.int32)
    return tl.philox(seed, blocks, position, stream, draft_step, 10)


@triton.jit
def words_to_uniform(words):
    """float64 in (0, 1): (x + 0.5) * 2**-32, exact."""
    return (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def log_of_parts(f, k):
    """log((1 + f) * 2**k) in float32, sqrt(1/2) <= 1 + f < sqrt(2), within an ulp or two: fdlibm's logf.

    At k = 0 the error is relative to f, however small it is.
    """
    s = tl.div_rn(f, 2.0 + f)
    z = s * s
    series = z * (0.66666662693 + z * (0.40000972152 + z * (0.28498786688 + z * 0.24279078841)))
    half_square = 0.5 * f * f
    return k * 0.69313812256 + (f - (half_square - (s * (half_square + series) + k * 9.0580006145e-06)))


@triton.jit
def log(x):
    """Natural logarithm of positive, finite, normal float32."""
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - SQRT_HALF_BITS)
    mantissa = ((bits & 0x7FFFFF) + SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    return log_of_parts(mantissa - 1.0, ((bits >> 23) - 127).to(tl.float32))


@triton.jit
def words_to_gumbel(words):
    """float32 standard Gumbel variates -log(-log1p(-w)), w = (x + 0.5) * 2**-32.

    Near w = 0 the inner logarithm starts from w, elsewhere from 1 - w = (~x + 0.5) * 2**-32: whichever float32 holds
    to its own precision.
    """
    is_low = words < BELOW_HALF
    short = (tl.where(is_low, words, words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    bits = short.to(tl.int32, bitcast=True) + (0x3F800000 - SQRT_HALF_BITS)
    mantissa = ((bits & 0x7FFFFF) + SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    f = tl.where(is_low, -short, mantissa - 1.0)
    k = tl.where(is_low, 0.0, ((bits >> 23) - 127).to(tl.float32))
    return -log(-log_of_parts(f, k))


@triton.jit
def gumbel_block(seed, position, stream, draft_step, start, BLOCK: tl.constexpr):
    """float32 [BLOCK]: the noise of vocabulary entries start .. start + BLOCK - 1; both are multiples of 4."""
    blocks = start // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = random_words(seed, position, stream, draft_step, blocks)
    # Entry v takes lane v % 4.
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return words_to_gumbel(words)


@triton.jit
def gumbel_of(seed, position, stream, draft_step, tokens):
    """float32, shaped as tokens (int32): the noise of these vocabulary entries, wherever they lie."""
    a, b, c, d = random_words(seed, position, stream, draft_step, tokens // 4)
    lane = tokens % 4
    return words_to_gumbel(tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)))
