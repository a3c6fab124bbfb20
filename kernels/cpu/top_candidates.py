"""kernels/reference/top_candidates.py of logits as they are: noise and cuts are in them.

A row's candidates are those that are left in a heap of as many places; its mass is added up in one order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.bits import double_of_bits, float_of_bits, ordered
from kernels.cpu.compiled import exact, vectorized
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers
from kernels.cpu.philox import LN2_HIGH, LN2_LOW, log
from kernels.cpu.recording import empty
from kernels.cpu.sampling import image_of, largest_image
from kernels.cpu.threads import parts_of
from kernels.reference.top_candidates import Candidates

CHUNK = 256  # columns that are passed over together where none of them can be a candidate
PART_COLUMNS = 1 << 11  # searched in some microseconds
Arguments = arguments_of(
    *("candidates", "log_probs", "logits", "token_ids"),  # the last 0: a column's number is its token
    *("num_rows", "row_stride", "vocab_size", "width", "sharpness"),
)
NEG_INF, LOW_WORD = np.float32("-inf"), np.int64(0xFFFFFFFF)
LOG2_E, HALF = np.float64(1.4426950408889634), np.float64(0.5)
SMALLEST = np.float64(-708.0)  # whose exponential is normal
MANTISSA_BITS, BIAS = np.int64(52), np.int64(1023)
# exp(r) = 1 + r + r^2 / 2! + ... for r within log(2) / 2 of 0: the rest is below 2^-52.
E0, E1, E2, E3, E4, E5, E6, E7, E8, E9, E10, E11, E12 = (
    np.float64(1.0 / factorial)
    for factorial in (1, 1, 2, 6, 24, 120, 720, 5040, 40320, 362880, 3628800, 39916800, 479001600)
)


@exact
def exp(x: Any) -> Any:
    """float64, of one that is at most 0, off by an ulp or two; no less than the smallest that is normal."""
    x = max(x, SMALLEST)
    exponent = np.int32(np.floor(x * LOG2_E + HALF))
    r = (x - exponent * LN2_HIGH) - exponent * LN2_LOW
    series = E6 + r * (E7 + r * (E8 + r * (E9 + r * (E10 + r * (E11 + r * E12)))))
    series = E0 + r * (E1 + r * (E2 + r * (E3 + r * (E4 + r * (E5 + r * series)))))
    return series * double_of_bits((np.int64(exponent) + BIAS) << MANTISSA_BITS)


@vectorized
def mass_of(row: Any, highest: Any, sharpness: Any) -> Any:
    """The sum of exp(sharpness * logit - highest), without those that are no number."""
    mass = np.float64(0.0)
    for column in range(len(row)):
        logit = row[column] if row[column] == row[column] else NEG_INF
        mass += exp(sharpness * np.float64(logit) - highest)
    return mass


@exact
def key_of(logit: Any, token: Any) -> Any:
    """kernels/reference/order_keys.py, a NaN as -inf."""
    return (np.int64(image_of(logit if logit == logit else NEG_INF)) << 32) | (LOW_WORD - token)


@exact
def score_of(key: Any) -> Any:
    image = np.int32(key >> 32)
    return float_of_bits(ordered(image))


@exact
def sink(keys: Any, place: Any, count: Any) -> None:
    """Let the key of a place come to lie above none that is lower; of keys[: count], the lowest is the first."""
    key, child = keys[place], 2 * place + 1
    while child < count:
        if child + 1 < count and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[place] = keys[child]
        place, child = child, 2 * child + 1
    keys[place] = key


@exact
def select(keys: Any, row: Any, token_ids: Any, has_ids: Any) -> None:
    """As many keys as there is room for, the highest first."""
    width = len(keys)
    for column in range(width):
        keys[column] = key_of(row[column], token_ids[column] if has_ids else column)
    for place in range(width // 2 - 1, -1, -1):
        sink(keys, place, width)
    for first in range(width, len(row), CHUNK):
        count = min(CHUNK, len(row) - first)
        if np.int64(largest_image(row[first : first + count], count)) < keys[0] >> 32:
            continue
        for column in range(first, first + count):
            key = key_of(row[column], token_ids[column] if has_ids else column)
            if key > keys[0]:
                keys[0] = key
                sink(keys, 0, width)
    for last in range(width - 1, 0, -1):
        keys[0], keys[last] = keys[last], keys[0]
        sink(keys, 0, last)


@cache
def finding() -> Kernel:
    def find(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        logits, log_probs = floats(a.logits, a.num_rows, a.row_stride), floats(a.log_probs, a.num_rows, a.width)
        token_ids = integers(a.token_ids, a.vocab_size)  # never read where there are none
        for row in range(part, a.num_rows, num_parts):
            own, keys = logits[row, : a.vocab_size], integers(a.candidates + 8 * row * a.width, a.width)
            select(keys, own, token_ids, a.token_ids != 0)
            sharpness = np.float64(a.sharpness)
            highest = sharpness * np.float64(score_of(keys[0]))
            total = highest + log(mass_of(own, highest, sharpness)) if highest > NEG_INF else highest
            for rank in range(a.width):
                score = score_of(keys[rank])
                log_probs[row, rank] = min(sharpness * np.float64(score) - total, 0.0) if score > NEG_INF else NEG_INF
                keys[rank] = LOW_WORD - (keys[rank] & LOW_WORD)

    return Kernel(find, Arguments)


def top_candidates(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    width: int,  # in [1, vocab]
    token_ids: Tensor | None = None,  # [vocab] int64, all different, below 2**31 - 1: the token of each column
    *,
    sharpness: int = 1,
) -> Candidates:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert token_ids is None or token_ids.is_contiguous()
    num_rows, vocab_size = logits.shape
    assert 0 < width <= vocab_size
    found = Candidates(empty(num_rows, width, dtype=torch.int64), empty(num_rows, width))
    finding()(
        *(tensor.data_ptr() for tensor in (*found, logits)),
        0 if token_ids is None else token_ids.data_ptr(),
        *(num_rows, logits.stride(0), vocab_size, width, sharpness),
        parts=parts_of(num_rows * vocab_size, PART_COLUMNS, num_rows),
    )
    return found
