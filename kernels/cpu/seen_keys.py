"""Which keys the rows of a tile see, and where these lie in the paged cache: for kernels/cpu/attend.py.

`a` are its arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.compiled import inlined, vectorized
from kernels.cpu.key_panels import KEYS
from kernels.cpu.native import integers

# Of every key where it lies in the cache, its own numbers, and its values; and where those of the next KEYS lie.
OFFSETS = 4


@vectorized
def offsets_into(offsets: Any, a: Any, segment: Any, start: Any, end: Any) -> None:
    """offsets[key - start] = where the key lies in the flat cache, for the segment's keys in [start, end)."""
    tables = integers(a.tables, a.num_segments // a.segments_per_table * a.num_blocks).reshape(-1, a.num_blocks)
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
def shift_offsets(offsets: Any, count: Any, key_column: Any, value_column: Any) -> None:
    """offsets[1] and [2], of a KV head's columns; what lies behind the last key is the last one again."""
    for key in range(KEYS):
        offset = offsets[0, min(key, count - 1)]
        offsets[1, key] = offset + np.uint64(key_column)
        offsets[2, key] = offset + np.uint64(value_column)


@vectorized
def keys_ahead(offsets: Any, a: Any, segment: Any, start: Any, end: Any, heads: Any) -> Any:
    """Where the keys lie that are taken in after KEYS from `start` on by one of KV heads, how many, and by which head.

    heads: this one, the first, and the one behind the last of those that take keys in together, up to `end`.
    """
    head, first, behind = heads
    if head + 1 < behind:
        return offsets[0], min(end - start, KEYS), head + 1
    count = max(min(end - start - KEYS, KEYS), 0)
    offsets_into(offsets[3], a, segment, start + KEYS, start + KEYS + count)
    return offsets[3], count, first


@inlined
def keys_of(a: Any, tile: Any, row: Any) -> Any:
    """The first key that a row of a tile sees, and the one behind the last. A tree's rows are tiles, one each."""
    apart = row if a.segments_per_table > 1 else np.int64(0)
    own = integers(a.positions, a.num_tiles)[tile + apart] + (row - apart)
    last_key = integers(a.last_keys, a.num_tiles)[tile + apart]
    last = own if a.is_causal else (own + a.window - 1 if a.window else last_key)
    first = np.int64(0)
    if a.window > 0:
        first = max(own - a.window + 1, np.int64(0))
    if a.window < 0:  # chunks of so many
        first = own - own % -a.window
    # Rows behind the context that was announced are nobody's any more: their requests have ended.
    return first, min(min(last, last_key) + 1, a.max_context)


@inlined
def keys_from(a: Any, tile: Any, row: Any, start: Any) -> Any:
    """Those of KEYS keys from `start` on, counted from there."""
    first, end = keys_of(a, tile, row)
    end = max(min(end, start + KEYS) - start, 0)
    return min(max(first - start, 0), end), end


@vectorized
def keys_of_rows(a: Any, tile: Any, low: Any, high: Any) -> Any:
    """The first key that any row of [low, high) sees, and the one behind the last that any does."""
    first, end = a.max_context, np.int64(0)
    for row in range(low, high):
        own_first, own_end = keys_of(a, tile, row)
        first, end = min(first, own_first), max(end, own_end)
    return first, end
