"""Rows of logits over their temperature, truncated by min_p, top_k and top_p as kernels/reference/sampling.py says.

Nothing is sorted: a cut is found byte by byte of float32's order-preserving image, from what lies in each of 256 bins.
Tokens are counted and mass is added up in integers, so that no order could move a cut.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.bits import bits_of_float, float_of_bits
from kernels.cpu.compiled import exact
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.philox import log
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference.sampling import EXP2_COEFFICIENTS, FIXED_LOG2_E

BINS, LEVELS = 256, 4
PART_COLUMNS = 1 << 11  # truncated in some microseconds
Arguments = arguments_of(
    *("processed", "logits", "is_greedy", "temperatures", "min_p", "top_k", "top_p"),  # 0: there is none
    *("bins", "num_rows", "num_owners", "row_stride", "vocab_size"),
)
NOTHING, NEG_INF, UNIT = np.float32(0.0), np.float32("-inf"), np.float32(2.0**26)
FARTHEST = np.float32(32.0 - 2.0**-19)
SIGN, ALL = np.uint32(0x80000000), np.uint32(0xFFFFFFFF)
LOG2E, MASK = np.int64(FIXED_LOG2_E), np.int64(0x7FFFFFFF)
C0, C1, C2, C3, C4, C5 = (np.int64(value) for value in EXP2_COEFFICIENTS)


@exact
def place_of(value: Any) -> Any:
    """uint32 in the order of float32."""
    bits = np.uint32(bits_of_float(value))
    return bits ^ ALL if bits & SIGN else bits ^ SIGN


@exact
def value_of(place: Any) -> Any:
    return float_of_bits(np.int32(place ^ SIGN if place & SIGN else place ^ ALL))


@exact
def weight_of(value: Any, maximum: Any) -> Any:
    """kernels.reference.sampling.fixed_point_weights, in the same integers."""
    product = np.int64(min(maximum - value, FARTHEST) * UNIT) * LOG2E
    rest = MASK - ((product >> 26) & MASK)
    power = rest * C5 >> 31
    power = (power + C4) * rest >> 31
    power = (power + C3) * rest >> 31
    power = (power + C2) * rest >> 31
    power = (power + C1) * rest >> 31
    power = (power + C0) * rest >> 31
    return ((power + (np.int64(1) << 32)) << 11) >> (product >> 57)


@exact
def cut_of(row: Any, bins: Any, needed: Any, maximum: Any, by_mass: Any) -> Any:
    """The largest value at or above which there are `needed` tokens, or so much mass; bins: [BINS] int64 of room."""
    found = np.uint32(0)
    for level in range(LEVELS):
        shift = np.uint32(8 * (LEVELS - 1 - level))
        for number in range(BINS):
            bins[number] = 0
        for token in range(len(row)):
            place = place_of(row[token])
            # The first byte is searched among all; then among those whose bytes so far are what has been found.
            if level == 0 or place >> (shift + np.uint32(8)) == found:
                own = np.int64((place >> shift) & np.uint32(BINS - 1))
                bins[own] += weight_of(row[token], maximum) if by_mass else 1
        number = BINS - 1
        while number > 0 and bins[number] < needed:
            needed -= bins[number]
            number -= 1
        found = np.uint32((found << np.uint32(8)) | np.uint32(number))
    return value_of(found)


@exact
def drop_below(row: Any, cut: Any) -> None:
    for token in range(len(row)):
        row[token] = NEG_INF if row[token] < cut else row[token]


@cache
def truncating() -> Kernel:
    def truncate(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        vocab_size = a.vocab_size
        processed, logits = floats(a.processed, a.num_rows, vocab_size), floats(a.logits, a.num_rows, a.row_stride)
        bins = integers(a.bins + 8 * BINS * thread, BINS)
        # What there is none of is never read.
        is_greedy = carray(pointer(a.is_greedy), (a.num_owners,), np.uint8)
        temperatures, min_p = floats(a.temperatures, 1, a.num_owners)[0], floats(a.min_p, 1, a.num_owners)[0]
        top_k, top_p = integers(a.top_k, a.num_owners), carray(pointer(a.top_p), (a.num_owners,), np.float64)
        for index in range(part, a.num_rows, num_parts):
            row, maximum, owner = processed[index], NEG_INF, index // (a.num_rows // a.num_owners)
            is_drawn = not (a.is_greedy != 0 and is_greedy[owner] != 0)
            divides = is_drawn and a.temperatures != 0
            for token in range(vocab_size):
                row[token] = logits[index, token] / temperatures[owner] if divides else logits[index, token]
                maximum = max(maximum, row[token])
            if not is_drawn or maximum == NEG_INF:
                continue
            if a.min_p != 0 and min_p[owner] > NOTHING:
                drop_below(row, maximum + np.float32(log(np.float64(min_p[owner]))))
            if a.top_k != 0 and 0 < top_k[owner] < vocab_size:
                drop_below(row, cut_of(row, bins, top_k[owner], maximum, False))
            if a.top_p != 0 and top_p[owner] < 1.0:
                total = np.int64(0)
                for token in range(vocab_size):
                    total += weight_of(row[token], maximum)
                needed = np.int64(np.ceil(top_p[owner] * np.float64(total)))
                drop_below(row, cut_of(row, bins, min(max(needed, np.int64(1)), total), maximum, True))

    return Kernel(truncate, Arguments)


def truncate(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    *,
    is_greedy: Tensor | None = None,  # [num_owners] bool: as they are; None = no row
    temperatures: Tensor | None = None,  # [num_owners] float32
    min_p: Tensor | None = None,  # [num_owners] float32; 0: no cut
    top_k: Tensor | None = None,  # [num_owners] int64; <= 0 or >= vocab: no cut
    top_p: Tensor | None = None,  # [num_owners] float64; 1: no cut
) -> Tensor:
    """logits / temperature [num_rows, vocab] float32, -inf where a cut drops a token.

    Rows are owner by owner, equally many of each.
    """
    values = (is_greedy, temperatures, min_p, top_k, top_p)
    assert all(value is None or value.is_contiguous() for value in values)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    num_owners = len(next((value for value in values if value is not None), logits))
    assert vocab_size < 1 << 19, "fixed-point mass of more tokens may overflow"
    processed = empty(num_rows, vocab_size)
    bins = empty(torch.get_num_threads() * BINS, dtype=torch.int64)
    truncating()(
        *(processed.data_ptr(), logits.data_ptr()),
        *(0 if value is None else value.data_ptr() for value in values),
        *(bins.data_ptr(), num_rows, num_owners, logits.stride(0), vocab_size),
        parts=parts_of(num_rows * vocab_size, PART_COLUMNS, num_rows),
    )
    return processed
