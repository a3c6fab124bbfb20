"""Softmax attention over a paged cache: the rows and heads of a tile that share keys together, KEYS keys at a time.

So rows that verify guesses cost little more than one: keys are laid out once for all (kernels/cpu/key_panels.py), and
of a tree's rows those before the tree; each lays out its own path behind them. Keys lie at their absolute positions,
and a row takes them in from the first on, with a running maximum (Milakov and Gimelshein, arXiv 1805.02867; Dao et al.,
arXiv 2205.14135): the bits of a row depend on its query and the keys that it sees alone, whatever rows share its tile,
as long as values are finite: those of keys that only its neighbours see count nothing.

Products are those of kernels/cpu/multiply_add.py, in float32, or of pairs of bfloat16, where the CPU multiplies these:
in vector lanes too, or on a matrix unit (kernels/cpu/amx.py). Then products of queries and keys are exact, sums
float32, and weights are rounded to bfloat16 for their products with values, as flash attention does on a GPU.
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from kernels.cpu.amx import INPUTS, ROWS, configure, multiply_tiles, release
from kernels.cpu.bits import float_of_bits
from kernels.cpu.compiled import compiled
from kernels.cpu.elements import ELEMENTS, elements
from kernels.cpu.float_kinds import TURN_ROWS
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.key_panels import KEYS, expand, fetch, pair_keys, pair_values, spread_keys, spread_values
from kernels.cpu.multiply_add import add_products
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.number_kinds import kind_of
from kernels.cpu.panels import LANES, has_feature, multiplies_pairs
from kernels.cpu.running_softmax import begin_rows, end_rows, weigh_rows
from kernels.cpu.seen_keys import OFFSETS, keys_ahead, keys_of, keys_of_rows, offsets_into, shift_offsets

HEADS = 4  # of one KV head, at most, that are a unit of work
NEIGHBOURS = 512  # rows of neighbouring units, at most, that take keys in together, as these lie in memory
TREE_ROWS = 64  # of one tree, at most, that do so
NOTHING = np.float32(0.0)

Arguments = arguments_of(
    *("output", "query", "kv", "sinks"),  # addresses, of the layer's; sinks 0: there are none
    *("segments", "rows", "sizes", "positions", "last_keys", "tables", "branch_starts", "branch_slots"),  # the launch's
    *("offsets", "room", "nothing"),  # the first two of every thread, OFFSETS * KEYS uint64, and
    "thread_floats",
    *("num_rows", "num_heads", "query_stride", "num_slots", "width", "num_tiles", "num_segments", "num_blocks"),
    *("segments_per_table", "num_branch", "block_size", "num_kv_heads", "head_dim", "value_dim", "window", "is_causal"),
    "first_value",  # column of a row of the cache: 0 where a key holds its value
    "max_context",  # no key from here on is read
    # The bits of float32s: what scores are multiplied by, log2(e) included; or, where cap is not 0, they become
    # cap * tanh(scale * score), and the cap includes it; and what results are multiplied by.
    *("scale", "cap", "value_scale"),
)


def attends_in_pairs(dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    return dtype == torch.bfloat16 and head_dim % INPUTS == value_dim % INPUTS == 0 and multiplies_pairs()


def vectors_of(value_dim: int) -> int:
    """Of sums that a row has registers for, and into which a value can be cut."""
    vectors = -(-value_dim // LANES)
    return (4 if vectors % 4 == 0 else 2 if vectors % 2 == 0 else 1) if has_feature("avx512f") else 1


def room_of(tile_size: int, group: int, widest: int, *, expands: bool) -> int:
    """float32 that a thread needs for tiles of so many rows; whole vectors, so that each thread's begins on a line.

    widest: dimensions of a key or of a value, whichever has more. expands: keys, and then values, behind the rest.
    """
    wide = -(-widest // LANES) * LANES
    rows = max(tile_size * min(group, HEADS), NEIGHBOURS) + ROWS
    panels, turn, units = 2 * KEYS * wide, 2 * ROWS * KEYS, rows * (2 * wide + 2)  # in this order
    return -(-(panels + turn + units) // LANES) * LANES + (KEYS * wide if expands else 0)


@compiled
def heads_of(unit: Any, group: Any, blocks: Any) -> Any:
    """A unit's first head, and their number."""
    kv_head, block = unit // blocks, unit % blocks
    return kv_head * group + block * HEADS, min(group - block * HEADS, HEADS)


@cache
def attention(
    element: Any, vectors: int, key_vectors: int, is_paired: bool, on_amx: bool, expands: bool = False
) -> Kernel:
    """Of tensors of these elements, with values and keys in panels of so many vectors; is_paired: of bfloat16s.

    expands: the cache is of numbers of 8 bits.
    """
    lanes, key_lanes, turn_rows = LANES * vectors, LANES * key_vectors, ROWS if on_amx else TURN_ROWS
    factor, dtype = (ELEMENTS[torch.bfloat16], torch.bfloat16) if is_paired else (np.float32, torch.float32)
    kept = np.uint8 if expands else element
    factor_bytes, kept_bytes, kind = np.dtype(factor).itemsize, np.dtype(kept).itemsize, kind_of(dtype)
    inputs = 2 if is_paired else 1  # of a step in vector lanes
    step_keys = INPUTS if on_amx else inputs

    def attend_part(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        dim, value_dim, num_tiles, group = a.head_dim, a.value_dim, a.num_tiles, a.num_heads // a.num_kv_heads
        columns, blocks = (value_dim + lanes - 1) // lanes, (group + HEADS - 1) // HEADS
        output = elements(a.output, a.num_rows, a.num_heads * value_dim, element)
        sinks = floats(a.sinks, 1, a.num_heads if a.sinks else 0)[0]
        queries = elements(a.query, a.num_rows, a.query_stride, element)
        # Where keys are read, and then values: in the cache, or where they were expanded.
        room = KEYS * ((max(dim, value_dim) + LANES - 1) // LANES * LANES)
        source = a.room + 4 * ((thread + 1) * a.thread_floats - room) if expands else a.kv
        flat = elements(source, 1, KEYS * max(dim, value_dim) if expands else a.num_slots * a.width, element)[0]
        offsets_at = a.offsets + 8 * thread * OFFSETS * KEYS
        offsets = carray(pointer(offsets_at), (OFFSETS, KEYS), np.uint64)
        keys_at = a.room + 4 * thread * a.thread_floats
        values_at = keys_at + 4 * KEYS * ((dim + LANES - 1) // LANES * LANES)
        scores_at = values_at + 4 * KEYS * columns * lanes
        weights_at = scores_at + 4 * ROWS * KEYS
        results_at = weights_at + 4 * ROWS * KEYS
        scores, weights = floats(scores_at, turn_rows, KEYS), elements(weights_at, turn_rows, KEYS, factor)
        of_tile = a.num_kv_heads * blocks  # units: heads of one KV head
        is_tree = a.segments_per_table > 1
        families = (a.segments_per_table + TREE_ROWS - 1) // TREE_ROWS  # of tiles, a request's
        # The last rows of a prompt see most: they come first, so that who is free late gets little to do.
        units, part = num_tiles // a.segments_per_table * families * of_tile, num_parts - 1 - part
        unit, end = units * part // num_parts, units * (part + 1) // num_parts
        configured = 0
        while unit < end:
            family, first_unit = unit // of_tile, unit % of_tile
            tile = family // families * a.segments_per_table + family % families * TREE_ROWS
            size = integers(a.sizes, num_tiles)[tile]
            if is_tree:
                size = min(a.segments_per_table - family % families * TREE_ROWS, TREE_ROWS)
            first_row, segment = integers(a.rows, num_tiles)[tile], integers(a.segments, num_tiles)[tile]
            turns = (size * min(group, HEADS) + turn_rows - 1) // turn_rows
            members = min(end - unit, of_tile - first_unit, max(NEIGHBOURS // max(turns * turn_rows, 1), 1))
            wanted_at = results_at + 4 * members * turns * turn_rows * columns * lanes
            totals_at = wanted_at + factor_bytes * members * turns * turn_rows * dim
            results = carray(pointer(results_at), (members * turns, columns, turn_rows, lanes), np.float32)
            wanted = elements(wanted_at, members * turns * turn_rows, dim, factor)
            totals = floats(totals_at, 2, members * turns * turn_rows)
            results[:] = NOTHING
            for member in range(members):
                first_head, heads = heads_of(first_unit + member, group, blocks)
                place = member * turns * turn_rows
                begin_rows(wanted, totals, place, queries, sinks, first_row, size, first_head, heads)
            first_key, num_keys = keys_of_rows(a, tile, 0, size)
            shared_keys = integers(a.branch_starts, a.num_segments)[segment] if is_tree else num_keys + KEYS
            # Rows of a tile take in together what lies before here, and then each its own path.
            together = min(num_keys, shared_keys // KEYS * KEYS)
            start = first_key // KEYS * KEYS
            while start < num_keys:
                paths = 1 if start < together else size
                for visit in range(members * paths):
                    member, path = visit // paths, visit % paths
                    low, high = (path, path + 1) if paths > 1 else (np.int64(0), size)
                    count = min((keys_of(a, tile, path)[1] if paths > 1 else num_keys) - start, KEYS)
                    if count <= 0:
                        continue
                    kv_head = (first_unit + member) // blocks
                    is_first = path == 0 and (member == 0 or (first_unit + member) % blocks == 0)
                    if is_first or paths > 1:
                        begin = np.int64(0) if is_first else max(shared_keys - start, 0)  # the others lie there already
                        if paths > 1 or member == 0:
                            offsets_into(offsets[0, begin:], a, segment + low, start + begin, start + count)
                            if member == 0 and members == of_tile:  # a part of the heads would leave gaps as well
                                fetch(a.kv, offsets[0], begin, count, kept_bytes, a.width)
                        shift_offsets(offsets, count, kv_head * dim, a.first_value + kv_head * value_dim)
                        next_keys, num_next, next_head = offsets[0], np.int64(0), kv_head
                        if paths == 1 and members < of_tile:
                            kv_heads = kv_head, first_unit // blocks, (first_unit + members - 1) // blocks + 1
                            next_keys, num_next, next_head = keys_ahead(offsets, a, segment, start, together, kv_heads)
                        keys_next = next_keys, num_next, next_head * dim
                        values_next = next_keys, num_next, a.first_value + next_head * value_dim
                        own, seen, ahead = offsets_at + 8 * KEYS, (max(first_key - start, 0), count), keys_next
                        if expands:
                            expand(source, flat, a.kv, offsets[1], begin, count, ahead, dim)
                            ahead = next_keys, np.int64(0), np.int64(0)
                        if is_paired:
                            pair_keys(keys_at, source, own, begin, count, ahead, dim)
                        else:
                            spread_keys(keys_at, source, flat, offsets[1], own, begin, count, ahead, dim, key_lanes)
                        ahead = values_next
                        if expands:
                            expand(source, flat, a.kv, offsets[2], begin, count, ahead, value_dim)
                            ahead = next_keys, np.int64(0), np.int64(0)
                        if is_paired:
                            zeros = a.nothing
                            pair_values(
                                values_at, source, offsets[2], begin, seen, ahead, step_keys, zeros, value_dim, lanes
                            )
                        else:
                            spread_values(values_at, source, flat, offsets[2], begin, seen, ahead, value_dim, lanes)
                    heads = heads_of(first_unit + member, group, blocks)[1]
                    row, behind = low * heads, high * heads
                    while row < behind:
                        turn, place = member * turns + row // turn_rows, row % turn_rows
                        first, rows = turn * turn_rows + place, min(behind - row, turn_rows - place)
                        x, x_bytes = wanted_at + factor_bytes * first * dim, factor_bytes * dim
                        if on_amx:
                            if rows != configured:
                                configure(rows)
                                configured = rows
                            multiply_tiles(0, 0, key_vectors, scores_at, x, keys_at, x_bytes, dim // INPUTS)
                        else:
                            steps = dim // inputs
                            for key in range(0, count, key_lanes):
                                out, line, panel = scores_at + 4 * key, 4 * KEYS, keys_at + 4 * key * steps
                                add_products(
                                    kind,
                                    key_vectors,
                                    rows,
                                    steps,
                                    out,
                                    line,
                                    a.nothing,
                                    0,
                                    x,
                                    x_bytes,
                                    panel,
                                    0,
                                    0,
                                    0,
                                    0,
                                )
                        own = totals[:, first : first + rows]
                        most = weigh_rows(a, weights, scores, results[turn], place, own, tile, row, heads, start)
                        steps = (most + step_keys - 1) // step_keys
                        for column in range(columns if most else 0):
                            out = results_at + 4 * ((turn * columns + column) * turn_rows + place) * lanes
                            panel = values_at + factor_bytes * column * KEYS * lanes
                            if on_amx:
                                multiply_tiles(1, 0, vectors, out, weights_at, panel, 2 * KEYS, steps)
                            else:
                                x, line, x_bytes = weights_at, 4 * lanes, factor_bytes * KEYS
                                add_products(
                                    kind, vectors, rows, steps, out, line, out, line, x, x_bytes, panel, 0, 0, 0, 0
                                )
                        row += rows
                start += KEYS
            for member in range(members):
                first_head, heads = heads_of(first_unit + member, group, blocks)
                own, first = results[member * turns : (member + 1) * turns], member * turns * turn_rows
                scale = float_of_bits(np.int32(a.value_scale))
                end_rows(output, own, totals[:, first:], first_row, size, first_head, heads, value_dim, scale)
            unit += members
        if on_amx:
            release()

    return Kernel(attend_part, Arguments)
