"""Logits as kernels read, compare and add them up: integers that keep their order, weights that add up in any order."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.sampling import EXP2_COEFFICIENTS, FIXED_LOG2_E

_LOG2_E: tl.constexpr = tl.constexpr(FIXED_LOG2_E)
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(value) for value in EXP2_COEFFICIENTS)


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
def best_of_splits(ranks_ptr, num_splits, distance, SPLITS: tl.constexpr):
    """The highest of a row's ranks, `distance` apart, which other programs of the launch may have stored."""
    splits = tl.arange(0, SPLITS)
    ranks = tl.load(
        ranks_ptr + splits * distance, mask=splits < num_splits, other=-0x7FFFFFFFFFFFFFFF, cache_modifier=".cg"
    )
    return tl.max(ranks, axis=0)


@triton.jit
def load_logits(row_ptr, tokens, vocab_size):
    return tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def load_scaled(row_ptr, tokens, vocab_size, temperature):
    """logits / temperature, rounded once as in torch."""
    return tl.div_rn(load_logits(row_ptr, tokens, vocab_size), temperature)


@triton.jit
def is_drawn(positions_ptr, is_greedy_ptr, row):
    """Whether the row's token is drawn: the row is neither greedy nor padding."""
    wanted = tl.load(positions_ptr + row) >= 0
    if is_greedy_ptr is not None:
        wanted = wanted & (tl.load(is_greedy_ptr + row) == 0)
    return wanted


@triton.jit
def temperature_of(temperatures_ptr, row):
    temperature = tl.full((), 1.0, dtype=tl.float32)
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
    return temperature


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


def check_rows(rows: Tensor, *values: Tensor | None) -> None:
    """The kernels read tokens of a row, and one value a row, side by side."""
    assert rows.stride(1) == 1, "tokens side by side"
    assert all(value is None or value.is_contiguous() for value in values), "one value a row, side by side"
