"""The compiled part of NgramIndex: enters n-grams into a sequence's table, and finds where the last ones occurred.

A sequence's region holds `capacity` tokens, then an open-addressing table with linear probing. An entry is the position
behind an n-gram's most recent occurrence, below a part of its hash in the bits that positions leave free; 0 is empty.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiled import compiled

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Columns of the table of sequences: where its region starts, log2 of the region's capacity, tokens held, and the
# position that followed the longest known n-gram at its end (0: none is known).
START, CAPACITY_LOG2, LENGTH, MATCH = range(4)
NUM_PREFETCHED_TOKENS = 8  # of a sequence in a call; much more would push itself out of the cache


@compiled
def extend_and_draft(
    pool: Int32Array,
    sequences: Int64Array,
    min_n: int,
    max_n: int,
    table_log2: int,
    numbers: Int64Array,
    token_ids: Int32Array,
    num_new: Int64Array,
    num_wanted: Int64Array,
    drafts: Int64Array,
    cu_num_drafts: Int64Array,
) -> None:
    """NgramIndex.extend_and_draft, of regions that have room."""
    # Entries of a batch lie all over memory. What will be looked at is asked for first, so that misses overlap.
    for number in numbers:
        row = sequences[number]
        _prefetch(pool, row[START] + row[LENGTH])
    taken = 0
    for place, number in enumerate(numbers):
        row = sequences[number]
        start, length = row[START], row[LENGTH]
        for offset in range(num_new[place]):  # by elements: a slice brings numba's text of its errors along
            pool[start + length + offset] = token_ids[taken + offset]
        for end in range(length + 1, length + 1 + min(num_new[place], NUM_PREFETCHED_TOKENS)):
            _prefetch_entries(pool, start, row[CAPACITY_LOG2], end, min_n, max_n, table_log2)
        taken += num_new[place]
    given = 0
    for place, number in enumerate(numbers):
        row = sequences[number]
        start, length, match = row[START], row[LENGTH], row[MATCH]
        for end in range(length + 1, length + 1 + num_new[place]):
            match = _enter(pool, start, row[CAPACITY_LOG2], end, min_n, max_n, table_log2)
        length += num_new[place]
        row[LENGTH], row[MATCH] = length, match
        if match > 0:
            source = start + match
            for _ in range(num_wanted[place]):
                # Behind the end, what has just been copied: a match so near the end is a period, as in LZ77.
                drafts[given] = pool[source] if source < start + length else drafts[given - (length - match)]
                source += 1
                given += 1
        cu_num_drafts[place + 1] = given


@compiled
def move(
    pool: Int32Array,
    sequences: Int64Array,
    min_n: int,
    max_n: int,
    table_log2: int,
    number: int,
    start: int,
    capacity_log2: int,
) -> None:
    """Move a sequence's tokens to another region, its content undefined, and enter their n-grams again."""
    row = sequences[number]
    old_start, length = row[START], row[LENGTH]
    capacity = np.int64(1) << capacity_log2
    for offset in range(length):
        pool[start + offset] = pool[old_start + offset]
    for entry in range(start + capacity, start + capacity + (capacity << table_log2)):
        pool[entry] = 0
    match = 0
    for end in range(1, length + 1):
        match = _enter(pool, start, capacity_log2, end, min_n, max_n, table_log2)
    row[START], row[CAPACITY_LOG2], row[MATCH] = start, capacity_log2, match


@numba.njit(inline="always")
def _enter(pool: Int32Array, region: int, capacity_log2: int, end: int, min_n: int, max_n: int, table_log2: int) -> Any:
    """Enter the n-grams that end before position end; the position behind the longest one's last occurrence, or 0.

    Looking up and entering are one probe: what the entries held is the answer for the sequence as it is now, what they
    hold from now on is the answer when the next tokens have come.
    """
    table = region + (np.int64(1) << capacity_log2)
    slot_bits = capacity_log2 + table_log2
    last_slot = (np.int64(1) << slot_bits) - 1
    position_mask = (np.int64(1) << capacity_log2) - 1
    tag_mask = np.int64(0x7FFFFFFF) & ~position_mask
    match = np.int64(0)
    is_known = True  # the shorter n-gram has occurred before
    state = np.uint64(0)
    for n in range(1, min(max_n, end) + 1):
        state = _mix(state, pool[region + end - n])
        if n < min_n:
            continue
        slot = _slot(state, slot_bits)
        tag = np.int64(_scatter(state)) & tag_mask
        found = np.int64(0)
        while True:
            entry = np.int64(pool[table + slot])
            if entry == 0:
                break
            position = entry & position_mask
            # An equal tag is chance where the shorter n-gram is new, as this one is too, and so early in the text.
            if is_known and (entry & tag_mask) == tag and position >= n:
                offset = np.int64(1)
                while offset <= n and pool[region + position - offset] == pool[region + end - offset]:
                    offset += 1
                if offset > n:
                    found = position
                    break
            slot = (slot + 1) & last_slot
        pool[table + slot] = np.int32(tag | end)
        is_known = bool(found > 0)
        if is_known:
            match = found
    return match


@numba.njit(inline="always")
def _prefetch_entries(
    pool: Int32Array, region: int, capacity_log2: int, end: int, min_n: int, max_n: int, table_log2: int
) -> None:
    """Ask for the entries that `_enter` will begin its probes with."""
    table = region + (np.int64(1) << capacity_log2)
    state = np.uint64(0)
    for n in range(1, min(max_n, end) + 1):
        state = _mix(state, pool[region + end - n])
        if n >= min_n:
            _prefetch(pool, table + _slot(state, capacity_log2 + table_log2))


@numba.njit(inline="always")
def _mix(state: Any, token_id: Any) -> Any:
    """The state of an n-gram's hash from that of its last n - 1 tokens; uint64."""
    state = (state + np.uint64(token_id) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return state ^ (state >> np.uint64(29))


@numba.njit(inline="always")
def _scatter(state: Any) -> Any:
    return state * np.uint64(0xBF58476D1CE4E5B9)


@numba.njit(inline="always")
def _slot(state: Any, slot_bits: int) -> Any:
    """Where the probe begins: the highest bits, which all tokens have a say in; tags are taken from the lower half."""
    return np.int64(_scatter(state) >> np.uint64(64 - slot_bits))


def _typed_prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], which will be read and written soon; LLVM's llvm.prefetch."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer, int32, int32, int32])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function_type, "llvm.prefetch.p0i8"
        )
        address = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        for_writing, keep_close, data_cache = (ir.Constant(int32, value) for value in (1, 3, 1))
        builder.call(function, [address, for_writing, keep_close, data_cache])
        return context.get_dummy_value()

    return types.none(array, types.intp), emit


_prefetch: Any = intrinsic(_typed_prefetch)
