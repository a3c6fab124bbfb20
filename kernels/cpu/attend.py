"""Softmax attention over a paged cache row by row, key after key: what generated tokens are computed with."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from kernels.cpu.bits import float_of_bits, largest_of
from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import elements, narrow, widen
from kernels.cpu.exp2 import exp2
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer

NOTHING, LOWEST = np.float32(0.0), np.float32(-3.0e38)
# Unsigned, as offsets and keys are: of a signed index numba asks whether it counts from the end.
ONE, TWO, THREE, FOUR = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)


@vectorized
def score(weights: Any, wanted: Any, flat: Any, offsets: Any, first: Any, end: Any, column: Any) -> None:
    """weights[key] = wanted times the key, four at once, so that their sums do not wait for one another."""
    dim, key = np.uint64(len(wanted)), first
    while key + FOUR <= end:
        k0, k1 = offsets[key] + column, offsets[key + ONE] + column
        k2, k3 = offsets[key + TWO] + column, offsets[key + THREE] + column
        x0, x1, x2, x3 = NOTHING, NOTHING, NOTHING, NOTHING
        for d in range(dim):
            x0 += wanted[d] * widen(flat[k0 + d])
            x1 += wanted[d] * widen(flat[k1 + d])
            x2 += wanted[d] * widen(flat[k2 + d])
            x3 += wanted[d] * widen(flat[k3 + d])
        weights[key], weights[key + ONE], weights[key + TWO], weights[key + THREE] = x0, x1, x2, x3
        key += FOUR
    while key < end:
        k0, x0 = offsets[key] + column, NOTHING
        for d in range(dim):
            x0 += wanted[d] * widen(flat[k0 + d])
        weights[key] = x0
        key += ONE


@vectorized
def exponentiate(weights: Any, first: Any, end: Any) -> Any:
    """weights[key] = 2 ** (itself - the largest); their sum."""
    seen, total = weights[first:end], NOTHING
    largest = largest_of(seen, LOWEST)
    for key in range(len(seen)):
        seen[key] = exp2(seen[key] - largest)
        total += seen[key]
    return total


@vectorized
def weigh(result: Any, weights: Any, flat: Any, offsets: Any, first: Any, end: Any, column: Any) -> None:
    """result = the sum of the values times their weights, four at once: the result is written once for them."""
    dim, key = np.uint64(len(result)), first
    for d in range(dim):
        result[d] = NOTHING
    while key + FOUR <= end:
        v0, v1 = offsets[key] + column, offsets[key + ONE] + column
        v2, v3 = offsets[key + TWO] + column, offsets[key + THREE] + column
        w0, w1, w2, w3 = weights[key], weights[key + ONE], weights[key + TWO], weights[key + THREE]
        for d in range(dim):
            first_two = w0 * widen(flat[v0 + d]) + w1 * widen(flat[v1 + d])
            result[d] += first_two + w2 * widen(flat[v2 + d]) + w3 * widen(flat[v3 + d])
        key += FOUR
    while key < end:
        v0, w0 = offsets[key] + column, weights[key]
        for d in range(dim):
            result[d] += w0 * widen(flat[v0 + d])
        key += ONE


@vectorized
def offsets_into(offsets: Any, a: Any, segment: Any, start: Any, end: Any) -> None:
    """Where in the cache the keys of a segment from `start` up to `end` lie; a: the Arguments."""
    num_tables = a.num_segments // a.segments_per_table
    tables = integers(a.tables, num_tables * a.num_blocks).reshape(num_tables, a.num_blocks)
    branch_slots = integers(a.branch_slots, a.num_segments * a.num_branch).reshape(a.num_segments, a.num_branch)
    branch_start, block_size, width = integers(a.branch_starts, a.num_segments)[segment], a.block_size, a.width
    key, stop = start, min(end, branch_start)
    while key < stop:
        place = key % block_size
        slot = tables[segment // a.segments_per_table, key // block_size] * block_size + place
        for after in range(min(block_size - place, stop - key)):
            offsets[key - start + after] = np.uint64((slot + after) * width)
        key += block_size - place
    for apart in range(max(start, branch_start), end):
        offsets[apart - start] = np.uint64(branch_slots[segment, apart - branch_start] * width)


@vectorized
def keys_of(own: Any, last_key: Any, is_causal: Any, window: Any) -> Any:
    """The first key that a row at a position sees, and the one behind the last; last_key: of its tile."""
    last = own if is_causal else (own + window - 1 if window else last_key)
    return max(own - window + 1, 0) if window else 0, min(last, last_key) + 1


Arguments = arguments_of(
    *("output", "query", "kv"),  # addresses, of the layer's
    *("segments", "rows", "sizes", "positions", "last_keys", "tables", "branch_starts", "branch_slots"),  # the launch's
    *("offsets", "floats", "zeros"),  # the first two are room, of every thread thread_offsets uint64, and
    *("thread_offsets", "thread_floats"),
    *("num_rows", "columns", "query_stride", "num_slots", "width", "num_tiles", "num_segments", "num_blocks"),
    *("segments_per_table", "num_branch", "block_size", "num_kv_heads", "head_dim", "window", "is_causal"),
    "max_context",  # no key from here on is read
    "scale",  # of the logits, times log2(e): the bits of a float32
)


@cache
def attention(element: Any) -> Kernel:
    """Row by row, head by head, of tensors of these elements."""

    def attend_part(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        dim, num_tiles, num_heads = a.head_dim, a.num_tiles, a.columns // a.head_dim
        group = num_heads // a.num_kv_heads
        output = elements(a.output, a.num_rows, a.columns, element)
        query = elements(a.query, a.num_rows, a.query_stride, element)
        flat = elements(a.kv, 1, a.num_slots * a.width, element)[0]
        offsets = carray(pointer(a.offsets + 8 * thread * a.thread_offsets), (a.thread_offsets,), np.uint64)
        # Room: a key's weight each, then the query and the result.
        room = floats(a.floats, thread + 1, a.thread_floats)[thread]
        weights, wanted = room[: a.thread_offsets], room[a.thread_offsets : a.thread_offsets + dim]
        result, scale = room[a.thread_offsets + dim :][:dim], float_of_bits(np.int32(a.scale))
        begin, end = num_tiles * num_heads * part // num_parts, num_tiles * num_heads * (part + 1) // num_parts
        for tile in range(begin // num_heads, (end + num_heads - 1) // num_heads):
            size, first_row = integers(a.sizes, num_tiles)[tile], integers(a.rows, num_tiles)[tile]
            position, last_key = integers(a.positions, num_tiles)[tile], integers(a.last_keys, num_tiles)[tile]
            # Rows behind the context that was announced are nobody's any more: their requests have ended.
            num_keys = min(last_key + 1, a.max_context) if size else 0
            offsets_into(offsets, a, integers(a.segments, num_tiles)[tile], 0, num_keys)
            first_head, end_head = max(begin - tile * num_heads, 0), min(end - tile * num_heads, num_heads)
            for kv_head in range(first_head // group, (end_head + group - 1) // group):
                key_column, value_column = np.uint64(kv_head * dim), np.uint64((a.num_kv_heads + kv_head) * dim)
                for row in range(first_row, first_row + size):
                    seen = keys_of(position + row - first_row, last_key, a.is_causal, a.window)
                    first, behind = np.uint64(seen[0]), np.uint64(min(seen[1], num_keys))
                    for head in range(max(kv_head * group, first_head), min((kv_head + 1) * group, end_head)):
                        column = head * dim
                        for d in range(dim):
                            wanted[d] = widen(query[row, column + d]) * scale
                        score(weights, wanted, flat, offsets, first, behind, key_column)
                        total = exponentiate(weights, first, behind)
                        weigh(result, weights, flat, offsets, first, behind, value_column)
                        for d in range(dim):
                            output[row, column + d] = narrow(result[d] / total, output[row, column + d])

    return Kernel(attend_part, Arguments)
