"""What of its row each law keeps: argmax, maximum, cut and mass of logits rows, a program a row.

The law of a row is the softmax of logits / temperature over the values >= cut, where the cut stands for min_p, top_k
and top_p in that order (kernels/reference/sampling.py). Nothing is sorted: a cut is the largest float32 value for which
enough tokens, or enough mass, lie at or above it, and a k-ary search over float32's order-preserving integer image
finds it. Tokens are counted and mass is added up in integers, so no order of summation can move a cut: kept sets and
masses are the reference's bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.sampling import EXP2_COEFFICIENTS, LOG2_E

BLOCK = 2048  # tokens that a program looks at together
NUM_WARPS = 16
NUM_THRESHOLDS: tl.constexpr = tl.constexpr(8)  # measured in one pass of the search; even
_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(value) for value in EXP2_COEFFICIENTS)


class RowLaws(NamedTuple):
    """Of every row, greedy rows included; nothing is written for padding (a negative position)."""

    argmax: Tensor  # [num_rows] int64: of the logits as they came, ties to the lowest id
    maxima: Tensor  # [num_rows] float32: of logits / temperature
    cuts: Tensor  # [num_rows] float32: kept is what is >= this
    masses: Tensor  # [num_rows] int64: kernels.reference.sampling.fixed_point_weights of what is kept, added up


@triton.jit
def image_of(x):
    """float32 -> int32 in the same order (-0 just below 0); its own inverse on bits, see value_of."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(image):
    """The float32 of an image."""
    image = image.to(tl.int32)
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranks_of(scores, tokens, vocab_size):
    """int64 whose largest is the token of the largest score, ties to the lowest id; the least of all behind the row."""
    image = image_of(tl.where(scores == 0.0, 0.0, scores))  # -0 ties with 0
    ranks = (image.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)
    return tl.where(tokens < vocab_size, ranks, -0x7FFFFFFFFFFFFFFF)


@triton.jit
def token_of(rank):
    return 0x7FFFFFFF - (rank & 0xFFFFFFFF)


@triton.jit
def load_logits(row_ptr, tokens, vocab_size):
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def load_scaled(row_ptr, tokens, vocab_size, temperature):
    """logits / temperature, rounded once as in torch."""
    return tl.div_rn(load_logits(row_ptr, tokens, vocab_size), temperature)


@triton.jit
def fixed_point_weights(distances):
    """kernels.reference.sampling.fixed_point_weights of maximum - logit, in the same integers."""
    products = (tl.minimum(distances, 31.999998092651367) * 67108864.0).to(tl.int32).to(tl.int64) * _LOG2_E
    rest = ((0x7FFFFFFF - ((products >> 26) & 0x7FFFFFFF)) << 1).to(tl.uint32)
    power = tl.umulhi(rest, _C5) + _C4
    power = tl.umulhi(rest, power) + _C3
    power = tl.umulhi(rest, power) + _C2
    power = tl.umulhi(rest, power) + _C1
    power = tl.umulhi(rest, power) + _C0
    power = tl.umulhi(rest, power)
    return ((power.to(tl.int64) + 0x100000000) << 11) >> (products >> 57)


@triton.jit
def kept_mass(row_ptr, vocab_size, temperature, maximum, cut, BLOCK: tl.constexpr):
    mass = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, vocab_size, BLOCK):
        logits = load_scaled(row_ptr, start + tl.arange(0, BLOCK), vocab_size, temperature)
        mass += tl.where(logits >= cut, fixed_point_weights(maximum - logits), 0)
    return tl.sum(mass, axis=0)


@triton.jit
def largest_reaching(
    row_ptr, vocab_size, temperature, maximum, floor, needed, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest value that at least `needed` tokens, or weights that add up to it, are not below; floor suffices.

    A pass measures several thresholds between what is known to suffice and what is known not to, half of them at equal
    distances of value and half of image: logits are spread by value, but only the image bounds the number of passes
    (each leaves at most a fifth). The tokens between shrink it further: when they are all equal, that is the answer.
    """
    low, high = image_of(floor).to(tl.int64), image_of(maximum).to(tl.int64) + 1
    places = tl.arange(0, NUM_THRESHOLDS)
    steps = places % (NUM_THRESHOLDS // 2) + 1
    while high - low > 1:
        low_value, high_value = value_of(low), value_of(high)
        near = tl.maximum(low_value, high_value - 64.0)  # low_value may be -inf
        by_value = image_of(near + (high_value - near) * (steps / (NUM_THRESHOLDS // 2 + 1))).to(tl.int64)
        by_image = low + (high - low) * steps // (NUM_THRESHOLDS // 2 + 1)
        images = tl.where(places < NUM_THRESHOLDS // 2, by_value, by_image)
        images = tl.minimum(tl.maximum(images, low + 1), high - 1)
        thresholds = value_of(images)
        measured = tl.zeros((NUM_THRESHOLDS,), dtype=tl.int64)
        least = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
        most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            logits = load_scaled(row_ptr, tokens, vocab_size, temperature)
            is_between = (logits >= low_value) & (logits < high_value) & (tokens < vocab_size)
            least = tl.minimum(least, tl.where(is_between, logits, float("inf")))
            most = tl.maximum(most, tl.where(is_between, logits, float("-inf")))
            is_above = logits[:, None] >= thresholds[None, :]
            if BY_MASS:
                weights = fixed_point_weights(maximum - logits)
                measured += tl.sum(tl.where(is_above, weights[:, None], 0), axis=0)
            else:
                measured += tl.sum(is_above.to(tl.int32), axis=0)
        reaches = measured >= needed
        low = tl.maximum(low, tl.max(tl.where(reaches, images, low), axis=0))
        high = tl.minimum(high, tl.min(tl.where(reaches, high, images), axis=0))
        low = tl.maximum(low, image_of(tl.min(least, axis=0)).to(tl.int64))
        high = tl.minimum(high, image_of(tl.max(most, axis=0)).to(tl.int64) + 1)
    return value_of(low)


# What there is one of for each row lies side by side in one allocation, aligned or not as their number has it.
@triton.jit(do_not_specialize_on_alignment=["cuts_ptr", "masses_ptr", "positions_ptr"])
def row_laws_kernel(
    argmax_ptr,  # [num_rows] int64
    maxima_ptr,  # [num_rows] float32
    cuts_ptr,  # [num_rows] float32
    masses_ptr,  # [num_rows] int64, or None: not wanted
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    positions_ptr,  # [num_rows] int64
    is_greedy_ptr,  # [num_rows] bool, or None
    temperatures_ptr,  # [num_rows] float32, or None
    min_p_ptr,  # [num_rows] float32, or None
    top_k_ptr,  # [num_rows] int64, or None
    top_p_ptr,  # [num_rows] float64, or None
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(positions_ptr + row) >= 0:
        row_ptr = logits_ptr + row * row_stride
        best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, ranks_of(load_logits(row_ptr, tokens, vocab_size), tokens, vocab_size))
        rank = tl.max(best, axis=0)
        maximum = value_of(rank >> 32)
        tl.store(argmax_ptr + row, token_of(rank))
        nothing = tl.full((), float("-inf"), dtype=tl.float32)
        cut = nothing
        is_random = True
        if is_greedy_ptr is not None:
            is_random = tl.load(is_greedy_ptr + row) == 0
        if is_random:
            temperature = tl.full((), 1.0, dtype=tl.float32)
            if temperatures_ptr is not None:
                temperature = tl.load(temperatures_ptr + row)
            maximum = tl.div_rn(maximum, temperature)  # division keeps the order
            if min_p_ptr is not None:
                min_p = tl.load(min_p_ptr + row).to(tl.float64)
                if min_p > 0.0:
                    cut = maximum + tl.log(min_p).to(tl.float32)
            if top_k_ptr is not None:
                top_k = tl.load(top_k_ptr + row)
                if (top_k > 0) & (top_k < vocab_size):
                    # What min_p has dropped lies below the rest, so it changes the k-th value only where that is lower.
                    kth = largest_reaching(row_ptr, vocab_size, temperature, maximum, nothing, top_k, False, BLOCK)
                    cut = tl.maximum(cut, kth)
            if top_p_ptr is not None:
                top_p = tl.load(top_p_ptr + row)
                if top_p < 1.0:
                    total = kept_mass(row_ptr, vocab_size, temperature, maximum, cut, BLOCK)
                    needed = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
                    needed = tl.minimum(tl.maximum(needed, 1), total)
                    floor = tl.maximum(cut, maximum - 32.0)  # further away weights are 0
                    cut = largest_reaching(row_ptr, vocab_size, temperature, maximum, floor, needed, True, BLOCK)
            if masses_ptr is not None:
                tl.store(masses_ptr + row, kept_mass(row_ptr, vocab_size, temperature, maximum, cut, BLOCK))
        tl.store(maxima_ptr + row, maximum)
        tl.store(cuts_ptr + row, cut)


def check_rows(rows: Tensor, *values: Tensor | None) -> None:
    """The kernels read tokens of a row, and one value a row, side by side."""
    assert rows.stride(1) == 1, "tokens side by side"
    assert all(value is None or value.is_contiguous() for value in values), "one value a row, side by side"


def row_laws(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    positions: Tensor,  # [num_rows] int64; negative: padding
    *,
    is_greedy: Tensor | None = None,  # [num_rows] bool: the law is not wanted, argmax and maximum are the logits' own
    temperatures: Tensor | None = None,  # [num_rows] float32
    min_p: Tensor | None = None,  # [num_rows] float32; 0: no cut
    top_k: Tensor | None = None,  # [num_rows] int64; <= 0 or >= vocab: no cut
    top_p: Tensor | None = None,  # [num_rows] float64; 1: no cut
    need_mass: bool = True,
) -> RowLaws:
    """The laws of the rows. Without need_mass, masses are not computed: what is there means nothing."""
    check_rows(logits, positions, is_greedy, temperatures, min_p, top_k, top_p)
    num_rows, vocab_size = logits.shape
    assert vocab_size < 1 << 19, "fixed-point mass of more tokens may overflow"
    integers = torch.empty(2, num_rows, dtype=torch.int64, device=logits.device)
    floats = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    laws = RowLaws(argmax=integers[0], maxima=floats[0], cuts=floats[1], masses=integers[1])
    if num_rows:
        row_laws_kernel[(num_rows,)](
            laws.argmax,
            laws.maxima,
            laws.cuts,
            laws.masses if need_mass else None,
            logits,
            positions,
            is_greedy,
            temperatures,
            min_p,
            top_k,
            top_p,
            logits.stride(0),
            vocab_size,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return laws
