"""Softmax attention of rows over a paged cache, key after key: what kernels/cpu/paged_attention.py runs."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from kernels.cpu.bits import float_of_bits
from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import elements, narrow, widen
from kernels.cpu.exp2 import exp2
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.threads import num_threads, thread_num

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
    largest, total = LOWEST, NOTHING
    for key in range(first, end):
        largest = max(largest, weights[key])
    for key in range(first, end):
        weights[key] = exp2(weights[key] - largest)
        total += weights[key]
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
def attend(
    output: Any,  # [num_rows, num_heads * head_dim] of kernels/cpu/elements.py, as the next two
    query: Any,  # [num_rows, >= num_heads * head_dim]
    kv: Any,  # [num_slots, 2 * num_kv_heads * head_dim], keys before values
    segments: Any,  # [num_tiles] int64, and so on: PagedSegments
    rows: Any,
    sizes: Any,
    positions: Any,
    last_keys: Any,
    tables: Any,
    branch_starts: Any,
    branch_slots: Any,
    per_table: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    scale: np.float32,  # of the logits, times log2(e)
    window: int,  # 0: none
    is_causal: bool,
    offsets: Any,  # [max_context] uint64, and the same of weights, wanted, result: room for intermediate results
    weights: Any,  # [max_context] float32
    wanted: Any,  # [head_dim] float32
    result: Any,  # [head_dim] float32
    thread: int,  # of num_threads: it computes its share of the tiles' KV heads, or, where they are few, of rows' heads
    num_threads: int,
) -> None:
    group, width, flat = output.shape[1] // head_dim // num_kv_heads, kv.shape[1], kv.reshape(-1)
    by_head = len(rows) * num_kv_heads < num_threads
    for tile in range(len(rows)):
        segment, size, position, last_key = segments[tile], sizes[tile], positions[tile], last_keys[tile]
        # Rows behind the context that was announced are nobody's any more: their requests have ended.
        branch_start, num_keys = branch_starts[segment], min(last_key + 1, len(offsets)) if size else 0
        for start in range(0, min(num_keys, branch_start), block_size):
            first_slot = tables[segment // per_table, start // block_size] * block_size
            for place in range(min(block_size, num_keys - start)):
                offsets[start + place] = np.uint64((first_slot + place) * width)
        for apart in range(branch_start, num_keys):
            offsets[apart] = np.uint64(branch_slots[segment, apart - branch_start] * width)
        for kv_head in range(num_kv_heads):
            if not by_head and (tile * num_kv_heads + kv_head) % num_threads != thread:
                continue
            key_column, value_column = np.uint64(kv_head * head_dim), np.uint64((num_kv_heads + kv_head) * head_dim)
            for place in range(size):
                row, own = rows[tile] + place, position + place
                last = min(last_key, own if is_causal else (own + window - 1 if window else last_key))
                first, end = np.uint64(max(0, own - window + 1) if window else 0), np.uint64(min(last + 1, num_keys))
                for head in range(kv_head * group, (kv_head + 1) * group):
                    if by_head and (row * num_kv_heads * group + head) % num_threads != thread:
                        continue
                    column = head * head_dim
                    for d in range(head_dim):
                        wanted[d] = widen(query[row, column + d]) * scale
                    score(weights, wanted, flat, offsets, first, end, key_column)
                    total = exponentiate(weights, first, end)
                    weigh(result, weights, flat, offsets, first, end, value_column)
                    for d in range(head_dim):
                        output[row, column + d] = narrow(result[d] / total, output[row, column + d])


Arguments = arguments_of(
    *("output", "query", "kv"),  # addresses, of the layer's
    *("segments", "rows", "sizes", "positions", "last_keys", "tables", "branch_starts", "branch_slots"),  # the launch's
    *("offsets", "floats"),  # and of every thread's room: [max_context] uint64, [max_context + 2 * head_dim] float32
    *("num_rows", "columns", "query_stride", "num_slots", "width", "num_tiles", "num_segments", "num_blocks"),
    *(
        "segments_per_table",
        "num_branch",
        "block_size",
        "num_kv_heads",
        "head_dim",
        "window",
        "is_causal",
        "max_context",
    ),
    "scale",  # the bits of a float32
)


@cache
def attention(element: Any) -> Kernel:
    """`attend` with the Arguments at an address: the part of one thread."""

    def attend_in_thread(arguments: Any) -> None:
        a = carray(arguments, 1, Arguments)[0]
        thread, tiles, dim, keys = np.int64(thread_num()), a.num_tiles, a.head_dim, a.max_context
        own, num_tables = np.int64(8) * thread * keys, a.num_segments // a.segments_per_table
        room = floats(a.floats, np.int64(num_threads()), keys + 2 * dim)[thread]
        attend(
            elements(a.output, a.num_rows, a.columns, element),
            elements(a.query, a.num_rows, a.query_stride, element),
            elements(a.kv, a.num_slots, a.width, element),
            integers(a.segments, tiles),
            integers(a.rows, tiles),
            integers(a.sizes, tiles),
            integers(a.positions, tiles),
            integers(a.last_keys, tiles),
            integers(a.tables, num_tables * a.num_blocks).reshape(num_tables, a.num_blocks),
            integers(a.branch_starts, a.num_segments),
            integers(a.branch_slots, a.num_segments * a.num_branch).reshape(a.num_segments, a.num_branch),
            a.segments_per_table,
            a.block_size,
            a.num_kv_heads,
            dim,
            float_of_bits(np.int32(a.scale)),
            a.window,
            a.is_causal != 0,
            carray(pointer(a.offsets + own), (keys,), np.uint64),
            room[:keys],
            room[keys : keys + dim],
            room[keys + dim :],
            thread,
            np.int64(num_threads()),
        )

    return Kernel(attend_in_thread, Arguments)
