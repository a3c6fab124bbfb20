"""Softmax attention in bfloat16 on a CPU's matrix unit (kernels/cpu/amx.py): any rows of a tile, KEYS keys at a time.

All rows and heads of a tile that share keys are multiplied with them together, so rows that verify guesses cost little
more than one. Products of queries and keys are exact, sums float32; weights are rounded to bfloat16 for their products
with values, as flash attention does on a GPU (Dao et al., arXiv 2205.14135). As in attend_tiles.py the bits of a row
depend on its query and the keys that it sees alone, as long as values are finite.
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from kernels.cpu.amx import INPUTS, LINE, ROWS, configure, has_amx, multiply_tiles, release
from kernels.cpu.attend import LOWEST, NOTHING, Arguments, keys_of, offsets_into
from kernels.cpu.attend_tiles import HEADS, KEYS
from kernels.cpu.bits import bits_of_float, float_of_bits, ordered
from kernels.cpu.compiled import compiled, vectorized
from kernels.cpu.elements import ELEMENTS, elements, narrow
from kernels.cpu.exp2 import exp2
from kernels.cpu.kernel import Kernel
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.panels import LANES
from kernels.cpu.shuffles import ask_for, interleave, transpose

BFLOAT16, NO_WEIGHT = ELEMENTS[torch.bfloat16], np.uint16(0)
KEY_VECTORS, OFFSETS = KEYS // LANES, 3  # of each key: where it lies, its own words, and its values
MEMBER_TURNS = 8  # turns of neighbouring heads that take keys in together, as these lie in memory
SMALLEST = np.float32(2.0**-126)  # normal number: the matrix unit takes smaller ones for zero


def attends_on_amx(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype == torch.bfloat16 and head_dim % INPUTS == 0 and has_amx()


def room_of(tile_size: int, group: int, head_dim: int) -> int:
    """float32 that a thread needs for tiles of so many rows."""
    turns = max(-(-tile_size * min(group, HEADS) // ROWS), MEMBER_TURNS)
    return KEYS * head_dim + ROWS * (KEYS + KEYS // 2) + turns * ROWS * (head_dim + head_dim // 2 + 2)


@vectorized
def lay_out_keys(panel: Any, kv: Any, offsets: Any, count: Any, dim: Any) -> None:
    """A pair of dimensions of every key side by side. Addresses; offsets in words, of whole tiles of keys."""
    for key in range(0, count, LANES):
        for pair in range(0, dim // 2, LANES):
            transpose(panel + 4 * (pair * KEYS + key), 4 * KEYS, kv + 4 * pair, offsets + 8 * key)


@vectorized
def lay_out_values(
    panel: Any, kv: Any, offsets: Any, first: Any, end: Any, zeros: Any, columns: Any, lanes: Any
) -> None:
    """A dimension of both keys of a pair side by side; zeros where nobody sees them. Addresses; offsets in numbers."""
    for low in range(0, KEYS, 2):
        sees_low, sees_high = first <= low < end, first <= low + 1 < end
        for column in range(0, columns * lanes, lanes):
            for begin in range(column, column + lanes, 2 * LANES):
                lows = kv + 2 * (np.int64(offsets[low]) + begin) if sees_low else zeros
                highs = kv + 2 * (np.int64(offsets[low + 1]) + begin) if sees_high else zeros
                interleave(panel + 2 * (column * KEYS + low * lanes + 2 * (begin - column)), lows, highs)


@vectorized
def ask_for_head(kv: Any, offsets: Any, count: Any, key_column: Any, value_column: Any, dim: Any) -> None:
    """The keys and values of a head, before they are read."""
    for key in range(count):
        place = kv + 2 * np.int64(offsets[key])
        for line in range(0, 2 * dim, LINE):
            ask_for(place + 2 * key_column + line)
            ask_for(place + 2 * value_column + line)


@vectorized
def weigh(weights: Any, scores: Any, largest: Any, scale: Any, count: Any) -> Any:
    """Weights of as many keys; the largest score so far, and the sum of the weights."""
    total, found = NOTHING, ordered(bits_of_float(largest))
    for key in range(count):
        scores[key] *= scale
        own = ordered(bits_of_float(scores[key]))
        found = own if own > found else found
    largest = float_of_bits(ordered(found))
    for key in range(count):
        weight = exp2(scores[key] - largest)
        weights[key] = narrow(weight, weights[key])
        total += weight
    return largest, total


@vectorized
def weigh_seen(weights: Any, scores: Any, first: Any, end: Any, largest: Any, scale: Any) -> Any:
    """Keys in [first, end); others have no weight."""
    if first == 0 and end == KEYS:
        return weigh(weights, scores, largest, scale, KEYS)  # a number that the compiler knows
    weights[:first] = NO_WEIGHT
    weights[end:] = NO_WEIGHT
    return weigh(weights[first:end], scores[first:end], largest, scale, end - first)


@vectorized
def lessen(results: Any, row: Any, kept: Any) -> None:
    """results: [columns, ROWS, lanes] of a turn."""
    for column in range(results.shape[0]):
        own = results[column, row]
        for d in range(results.shape[2]):
            own[d] *= kept


@compiled
def turns_of(size: Any, group: Any) -> Any:
    """Tiles of ROWS for a unit's rows: those of a launch's tile, for each of its heads."""
    return (size * min(group, HEADS) + ROWS - 1) // ROWS


@compiled
def heads_of(unit: Any, group: Any, blocks: Any) -> Any:
    """A unit's first head, and their number."""
    kv_head, block = unit // blocks, unit % blocks
    return kv_head * group + block * HEADS, min(group - block * HEADS, HEADS)


@cache
def attention_on_amx(vectors: int) -> Kernel:
    """Values in panels of so many vectors."""
    lanes = LANES * vectors

    def attend_part(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        dim, num_tiles, group = a.head_dim, a.num_tiles, a.columns // a.head_dim // a.num_kv_heads
        columns, blocks = dim // lanes, (group + HEADS - 1) // HEADS
        output = elements(a.output, a.num_rows, a.columns, BFLOAT16)
        queries = elements(a.query, a.num_rows, a.query_stride, BFLOAT16)
        offsets_at = a.offsets + 8 * thread * a.thread_offsets
        offsets = carray(pointer(offsets_at), (OFFSETS, KEYS), np.uint64)
        keys_at, scale = a.floats + 4 * thread * a.thread_floats, float_of_bits(np.int32(a.scale))
        values_at = keys_at + 2 * KEYS * dim
        scores_at = values_at + 2 * KEYS * dim
        weights_at = scores_at + 4 * ROWS * KEYS
        results_at = weights_at + 2 * ROWS * KEYS
        scores, weights = floats(scores_at, ROWS, KEYS), elements(weights_at, ROWS, KEYS, BFLOAT16)
        of_tile = a.num_kv_heads * blocks  # units: heads of one KV head, at most HEADS
        units, part = num_tiles * of_tile, num_parts - 1 - part  # see attend_tiles.py
        unit, end = units * part // num_parts, units * (part + 1) // num_parts
        configured = 0
        while unit < end:
            tile, first_unit = unit // of_tile, unit % of_tile
            size, first_row = integers(a.sizes, num_tiles)[tile], integers(a.rows, num_tiles)[tile]
            position, last_key = integers(a.positions, num_tiles)[tile], integers(a.last_keys, num_tiles)[tile]
            segment, turns = integers(a.segments, num_tiles)[tile], turns_of(size, group)
            members = min(end - unit, of_tile - first_unit, max(MEMBER_TURNS // max(turns, 1), 1))
            wanted_at = results_at + 4 * members * turns * ROWS * dim
            totals_at = wanted_at + 2 * members * turns * ROWS * dim
            results = carray(pointer(results_at), (members * turns, columns, ROWS, lanes), np.float32)
            wanted = elements(wanted_at, members * turns * ROWS, dim, BFLOAT16)
            totals = floats(totals_at, 2, members * turns * ROWS)
            results[:] = NOTHING
            for member in range(members):
                first_head, heads = heads_of(first_unit + member, group, blocks)
                for row in range(heads * size):
                    place, column = member * turns * ROWS + row, (first_head + row // size) * dim
                    totals[0, place], totals[1, place] = LOWEST, NOTHING
                    wanted[place] = queries[first_row + row % size, column : column + dim]
            # Rows behind the context that was announced are nobody's any more: their requests have ended.
            num_keys = min(last_key + 1, a.max_context) if size else 0
            first_key = keys_of(position, last_key, a.is_causal, a.window)[0]
            start = first_key // KEYS * KEYS
            while start < num_keys:
                count, seen_from = min(num_keys - start, KEYS), max(first_key - start, 0)
                offsets_into(offsets[0], a, segment, start, start + count)
                for member in range(members):
                    kv_head = (first_unit + member) // blocks
                    key_column, value_column = kv_head * dim, (a.num_kv_heads + kv_head) * dim
                    if member == 0 or (first_unit + member) % blocks == 0:
                        for key in range(KEYS):  # what lies behind the last is the last one again
                            offset = offsets[0, min(key, count - 1)]
                            offsets[1, key] = (offset + np.uint64(key_column)) // np.uint64(2)  # in words
                            offsets[2, key] = offset + np.uint64(value_column)
                        if member + 1 < members:
                            ask_for_head(a.kv, offsets[0], count, key_column + dim, value_column + dim, dim)
                        lay_out_keys(keys_at, a.kv, offsets_at + 8 * KEYS, count, dim)
                        lay_out_values(values_at, a.kv, offsets[2], seen_from, count, a.zeros, columns, lanes)
                    num_rows = heads_of(first_unit + member, group, blocks)[1] * size
                    for turn in range((num_rows + ROWS - 1) // ROWS):
                        own = member * turns + turn
                        first, rows, most = own * ROWS, min(num_rows - turn * ROWS, ROWS), np.int64(0)
                        if rows != configured:
                            configure(rows)
                            configured = rows
                        queries_at = wanted_at + 2 * first * dim
                        multiply_tiles(0, KEY_VECTORS, scores_at, queries_at, keys_at, 2 * dim, dim // INPUTS)
                        for row in range(rows):
                            row_position = position + (turn * ROWS + row) % size
                            low, high = keys_of(row_position, last_key, a.is_causal, a.window)
                            high = max(min(high - start, count), 0)
                            low, most = min(max(low - start, 0), high), max(most, high)
                            before = totals[0, first + row]
                            largest, total = weigh_seen(weights[row], scores[row], low, high, before, scale)
                            if largest != before:
                                kept = exp2(before - largest)
                                lessen(results[own], row, kept)
                                totals[0, first + row], totals[1, first + row] = largest, totals[1, first + row] * kept
                            totals[1, first + row] += total
                        for column in range(columns if most else 0):
                            sums_at = results_at + 4 * (own * columns + column) * ROWS * lanes
                            panel, steps = values_at + 2 * column * KEYS * lanes, (most + INPUTS - 1) // INPUTS
                            multiply_tiles(1, vectors, sums_at, weights_at, panel, 2 * KEYS, steps)
                start += KEYS
            for member in range(members):
                first_head, heads = heads_of(first_unit + member, group, blocks)
                for row in range(heads * size):
                    own, total = member * turns + row // ROWS, totals[1, member * turns * ROWS + row]
                    for column in range(columns):
                        begin, result = (
                            (first_head + row // size) * dim + column * lanes,
                            results[own, column, row % ROWS],
                        )
                        out = output[first_row + row % size, begin : begin + lanes]
                        for d in range(lanes):
                            number = result[d] if abs(result[d]) >= SMALLEST else NOTHING
                            out[d] = narrow(number / total, out[d])
            unit += members
        release()

    return Kernel(attend_part, Arguments)
