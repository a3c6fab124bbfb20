"""Softmax attention of a tile's rows over a paged cache, KEYS keys at a time: what prompts are computed with.

Keys lie at their absolute positions, and a row takes them in from the first on, with a running maximum (Milakov and
Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135): the bits of a row depend on its query and the keys that
it sees alone, whatever rows share its tile, as long as values are finite: those of keys that only its neighbours see
count nothing. Products are those of kernels/cpu/multiply_add.py, in float32.
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from kernels.cpu.attend import LOWEST, NOTHING, Arguments, keys_of, offsets_into
from kernels.cpu.bits import float_of_bits, largest_of
from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import elements, narrow, widen
from kernels.cpu.exp2 import exp2
from kernels.cpu.kernel import Kernel
from kernels.cpu.multiply_add import TURN_ROWS, add_products, kind_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.panels import LANES, has_feature

KEYS = 64  # that are taken in at a time
HEADS = 4  # of one KV head, at most, whose rows share the keys that have been laid out


def vectors_of(head_dim: int) -> int:
    """Of sums that a row has registers for, and into which a value can be cut."""
    vectors = -(-head_dim // LANES)
    return (4 if vectors % 4 == 0 else 2 if vectors % 2 == 0 else 1) if has_feature("avx512f") else 1


def room_of(tile_size: int, group: int, head_dim: int) -> int:
    """float32 that a thread needs for tiles of so many rows."""
    rows, dim = _padded(tile_size * min(group, HEADS), TURN_ROWS), _padded(head_dim, LANES)
    return _padded(2 * KEYS * dim + rows * (2 * dim + KEYS + 2), LANES)


def _padded(number: int, step: int) -> int:
    return -(-number // step) * step


@vectorized
def lay_out(panel: Any, values: Any, flat: Any, offsets: Any, first_key: Any, end: Any, dim: Any, lanes: Any) -> None:
    """Keys as panels of neighbours, one dimension after another; values as panels of dimensions, one key after another.

    offsets: of the keys, then of the values. Values before the first key are read, and weigh nothing.
    """
    for key in range(first_key):
        for first in range(0, dim, lanes):
            for d in range(lanes):
                values[first * KEYS + key * lanes + d] = NOTHING
    for key in range(first_key, end):
        source, own = np.int64(offsets[0, key]), key // lanes * lanes * dim + key % lanes
        for d in range(dim):
            panel[own + d * lanes] = widen(flat[source + d])
        source = np.int64(offsets[1, key])
        for first in range(0, dim, lanes):
            own = first * KEYS + key * lanes
            for d in range(min(lanes, dim - first)):
                values[own + d] = widen(flat[source + first + d])


@vectorized
def exponentiate_seen(scores: Any, first: Any, end: Any, largest: Any) -> Any:
    """Scores of keys in [first, end) become their weights, others nothing; the largest score so far, and the sum."""
    seen, total = scores[first:end], NOTHING
    largest = largest_of(seen, largest)
    for key in range(len(seen)):
        seen[key] = exp2(seen[key] - largest)
        total += seen[key]
    for key in range(first):
        scores[key] = NOTHING
    for key in range(end, KEYS):
        scores[key] = NOTHING
    return largest, total


@cache
def tile_attention(element: Any, vectors: int) -> Kernel:
    """Of tensors of these elements, in panels of so many vectors."""
    lanes, kind = LANES * vectors, kind_of(torch.float32)

    def attend_part(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        dim, num_tiles, group = a.head_dim, a.num_tiles, a.columns // a.head_dim // a.num_kv_heads
        wide, blocks = (dim + LANES - 1) // LANES * LANES, (group + HEADS - 1) // HEADS
        output = elements(a.output, a.num_rows, a.columns, element)
        query = elements(a.query, a.num_rows, a.query_stride, element)
        flat = elements(a.kv, 1, a.num_slots * a.width, element)[0]
        offsets = carray(pointer(a.offsets + 8 * thread * a.thread_offsets), (2, KEYS), np.uint64)
        room, scale = a.floats + 4 * thread * a.thread_floats, float_of_bits(np.int32(a.scale))
        units = num_tiles * a.num_kv_heads * blocks
        part = num_parts - 1 - part  # the last rows of a prompt see most: who is free late gets little to do
        for unit in range(units * part // num_parts, units * (part + 1) // num_parts):
            tile, kv_head = unit // (a.num_kv_heads * blocks), unit // blocks % a.num_kv_heads
            first_head = kv_head * group + unit % blocks * HEADS
            heads = min((kv_head + 1) * group - first_head, HEADS)
            size, first_row = integers(a.sizes, num_tiles)[tile], integers(a.rows, num_tiles)[tile]
            position, last_key = integers(a.positions, num_tiles)[tile], integers(a.last_keys, num_tiles)[tile]
            segment = integers(a.segments, num_tiles)[tile]
            num_turns = (heads * size + TURN_ROWS - 1) // TURN_ROWS
            rows = num_turns * TURN_ROWS  # those behind the last are nobody's
            values_at = room + 4 * KEYS * wide  # as the panel before it on a line of its own
            wanted_at = values_at + 4 * KEYS * wide
            results_at = wanted_at + 4 * rows * wide
            scores_at = results_at + 4 * rows * wide
            panel, values = floats(room, 1, KEYS * wide)[0], floats(values_at, 1, KEYS * wide)[0]
            wanted, results = floats(wanted_at, rows, wide), floats(results_at, rows, wide)
            scores, totals = floats(scores_at, rows, KEYS), floats(scores_at + 4 * rows * KEYS, 2, rows)
            for row in range(rows):
                totals[0, row], totals[1, row] = LOWEST, NOTHING
                for d in range(wide):
                    results[row, d], wanted[row, d] = NOTHING, NOTHING
                if row < heads * size:
                    launch_row, column = first_row + row % size, (first_head + row // size) * dim
                    for d in range(dim):
                        wanted[row, d] = widen(query[launch_row, column + d]) * scale
            num_keys = last_key + 1 if size else 0
            first_key = keys_of(position, last_key, a.is_causal, a.window)[0]
            start = first_key // KEYS * KEYS
            while start < num_keys:
                count = min(num_keys - start, KEYS)
                offsets_into(offsets[0], a, segment, start, start + count)
                for key in range(count):
                    offsets[1, key] = offsets[0, key] + np.uint64((a.num_kv_heads + kv_head) * dim)
                    offsets[0, key] += np.uint64(kv_head * dim)
                lay_out(panel, values, flat, offsets, max(first_key - start, 0), count, dim, lanes)
                for turn in range(num_turns):
                    first = turn * TURN_ROWS
                    for neighbour in range(0, KEYS, lanes):
                        add_products(
                            kind,
                            TURN_ROWS,
                            vectors,
                            scores_at + 4 * (first * KEYS + neighbour),
                            a.zeros,
                            wanted_at + 4 * first * wide,
                            room + 4 * neighbour * dim,
                            4 * KEYS,
                            0,
                            4 * wide,
                            dim,
                        )
                    most = np.int64(0)  # keys that any row of the turn sees
                    for row in range(first, first + TURN_ROWS):
                        low, high = keys_of(position + row % size, last_key, a.is_causal, a.window)
                        high = max(min(high - start, count), 0)
                        low, most = min(max(low - start, 0), high), max(most, high)
                        largest, total = exponentiate_seen(scores[row], low, high, totals[0, row])
                        kept = exp2(totals[0, row] - largest)
                        totals[0, row], totals[1, row] = largest, totals[1, row] * kept + total
                        for d in range(wide):
                            results[row, d] *= kept
                    for column in range(0, wide, lanes):
                        add_products(
                            kind,
                            TURN_ROWS,
                            vectors,
                            results_at + 4 * (first * wide + column),
                            results_at + 4 * (first * wide + column),
                            scores_at + 4 * first * KEYS,
                            values_at + 4 * column * KEYS,
                            4 * wide,
                            4 * wide,
                            4 * KEYS,
                            most,
                        )
                start += KEYS
            for row in range(heads * size):
                launch_row, column = first_row + row % size, (first_head + row // size) * dim
                for d in range(dim):
                    result = results[row, d] / totals[1, row]
                    output[launch_row, column + d] = narrow(result, output[launch_row, column + d])

    return Kernel(attend_part, Arguments)
