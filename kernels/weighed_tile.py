"""The two halves of a norm that rides in products (kernels/reference/weighed_rows.py), as programs of theirs have them.

Tiles are [columns or parts, tokens], as those of kernels/linear_tile.py.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference import weighed_rows

PART: tl.constexpr = tl.constexpr(weighed_rows.PART)


@triton.constexpr_function
def levels(number):
    """Of pairs, of a power of 2."""
    return number.bit_length() - 1


@triton.jit
def add_neighbours(values, NUMBER: tl.constexpr):
    """[n * NUMBER, m] -> [n, m]; NUMBER is a power of 2.

    Two at a time: sums of more would be added in an order that follows from how a tile lies in registers.
    """
    WIDTH: tl.constexpr = values.shape[1]
    for _ in tl.static_range(levels(NUMBER)):
        values = tl.sum(tl.reshape(values, (values.shape[0] // 2, 2, WIDTH)), axis=1)
    return values


@triton.jit
def add_halves(values):
    """[n, m] -> [1, m]; n is a power of 2."""
    WIDTH: tl.constexpr = values.shape[1]
    for _ in tl.static_range(levels(values.shape[0])):
        values = tl.sum(tl.reshape(values, (2, values.shape[0] // 2, WIDTH)), axis=0)
    return values


@triton.jit
def load_squares(squares_ptr, first, tokens, num_rows, hidden, PARTS: tl.constexpr):
    """[PARTS, TOKENS] from the first on, zeros behind the last part; squares_ptr: [num_rows, parts]."""
    parts, num_parts = first + tl.arange(0, PARTS), tl.cdiv(hidden, PART)
    places = tokens.to(tl.int64)[None, :] * num_parts + parts[:, None]
    is_place = (tokens < num_rows)[None, :] & (parts < num_parts)[:, None]
    return tl.load(squares_ptr + places, mask=is_place, other=0.0)


@triton.jit
def load_pair(squares_ptr, first, distance, tokens, num_rows, hidden, PARTS: tl.constexpr):
    one = load_squares(squares_ptr, first, tokens, num_rows, hidden, PARTS)
    return one + load_squares(squares_ptr, first + distance, tokens, num_rows, hidden, PARTS)


@triton.jit
def sum_of_squares(squares_ptr, tokens, num_rows, hidden, PARTS: tl.constexpr):
    """[1, TOKENS], as add_halves(load_squares(...)) of all parts has it, an eighth at a time."""
    if PARTS < 8:
        total = load_squares(squares_ptr, 0, tokens, num_rows, hidden, PARTS)
    else:
        N: tl.constexpr = PARTS // 8
        total = load_pair(squares_ptr, 0, 4 * N, tokens, num_rows, hidden, N)
        total += load_pair(squares_ptr, 2 * N, 4 * N, tokens, num_rows, hidden, N)
        others = load_pair(squares_ptr, N, 4 * N, tokens, num_rows, hidden, N)
        others += load_pair(squares_ptr, 3 * N, 4 * N, tokens, num_rows, hidden, N)
        total += others
    return add_halves(total)


@triton.jit
def norm_factors(sum_of_row, hidden, eps):
    """[1, TOKENS]. Fused by name: compilers may fuse a product with a sum in one program and not in the next."""
    return tl.rsqrt(tl.fma(sum_of_row, 1.0 / hidden, eps))


@triton.jit
def store_squares(
    total,  # [columns, TOKENS], as rounded
    squares_ptr,  # [num_rows, parts]
    first,  # column, a multiple of PART
    columns,  # all of them, a multiple of PART in number
    tokens,
    num_rows,
    hidden,
):
    # Where squares are exact, so that one is the same whether or not it is fused with the sum that it goes into.
    wide = tl.where((columns < hidden)[:, None], total.to(tl.float64 if total.dtype == tl.float32 else tl.float32), 0.0)
    parts, num_parts = tl.arange(0, columns.shape[0] // PART) + first // PART, tl.cdiv(hidden, PART)
    places = tokens.to(tl.int64)[None, :] * num_parts + parts[:, None]
    is_place = (parts < num_parts)[:, None] & (tokens < num_rows)[None, :]
    tl.store(squares_ptr + places, add_neighbours(wide * wide, PART).to(tl.float32), mask=is_place)


@triton.jit
def weigh(total, weight):
    """[columns, TOKENS] times the norm's weight [columns], not yet rounded."""
    return total.to(tl.float32) * weight.to(tl.float32)[:, None]
