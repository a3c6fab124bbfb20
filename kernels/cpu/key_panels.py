"""Keys and values of a part of a context, laid out side by side as the products of kernels/cpu/attend.py take them.

In float32: of keys a dimension after another, of values a key after another. In bfloat16, where it is multiplied in
pairs: of keys a pair of dimensions after another, of values a pair of keys. Keys before `begin` lie there already.
Numbers of 8 bits are first expanded to the queries' type, in a thread's own room.

Heads one after another skip from row to row of the cache, which memory serves at a fraction of its speed. Where all
heads of a row are taken in together, `fetch` reads them first; where a part of them is, those of one head ask for the
next one's, line by line: `ahead` is where the keys taken in next lie, how many they are, and the head's column there.
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from kernels.cpu.compiled import inlined, vectorized
from kernels.cpu.elements import narrow, widen
from kernels.cpu.native import CACHE_LINE, ask, floats, pointer, touch
from kernels.cpu.panels import LANES
from kernels.cpu.shuffles import expand_lanes, interleave, transpose

KEYS = 64  # that are taken in at a time
NOTHING = np.float32(0.0)
UNWIDENED = np.uint32(0)  # words that shuffles.transpose leaves as they are


@vectorized
def fetch(kv: Any, offsets: Any, begin: Any, count: Any, size: Any, width: Any) -> None:
    """Whole rows of keys and values into a core's caches, in the order in which they lie: memory reads ahead then."""
    for key in range(begin, count):
        row = kv + size * np.int64(offsets[key])
        for line in range(row // CACHE_LINE * CACHE_LINE, row + size * width, CACHE_LINE):
            touch(line)


@inlined
def ask_ahead(kv: Any, ahead: Any, first: Any, end: Any, d: Any, size: Any) -> None:
    """For the lines of dimension d of keys [first, end) of those taken in next."""
    offsets, count, column = ahead
    for key in range(first, min(end, count)):
        ask(kv + size * (np.int64(offsets[key]) + column + d))


@vectorized
def expand(room: Any, flat: Any, kv: Any, offsets: Any, begin: Any, count: Any, ahead: Any, dim: Any) -> None:
    """A key or a value of numbers of 8 bits after another, in the room that `flat` begins at; offsets become theirs.

    From the first key on that shares a vector with those in [begin, count).
    """
    size = flat.itemsize
    for key in range(begin // LANES * LANES, count):
        source, target = kv + np.int64(offsets[key]), room + key * dim * size
        for d in range(0, dim, CACHE_LINE):
            ask_ahead(kv, ahead, key, key + 1, d, 1)
        whole = dim // (2 * LANES) * (2 * LANES)
        for d in range(0, whole, 2 * LANES):
            expand_lanes(target + d * size, source + d, flat[0])
        rest, own = carray(pointer(source + whole), (dim - whole,), np.uint8), flat[key * dim + whole : (key + 1) * dim]
        for d in range(len(rest)):
            own[d] = narrow(widen(rest[d]), own[d])
    for key in range(KEYS):
        offsets[key] = np.uint64(min(key, count - 1) * dim)


@vectorized
def spread_keys(
    panel: Any,
    kv: Any,
    flat: Any,
    offsets: Any,
    offsets_at: Any,
    begin: Any,
    count: Any,
    ahead: Any,
    dim: Any,
    lanes: Any,
) -> None:
    """Panels of `lanes` keys. offsets: in numbers, of all keys that share a vector with those that count."""
    size = flat.itemsize
    if dim % (4 * LANES // size) == 0:
        for key in range(begin // LANES * LANES, count, LANES):
            own = panel + 4 * (key // lanes * lanes * dim + key % lanes)
            for d in range(0, dim, 4 * LANES // size):
                place, offsets_of_keys = kv + size * d, offsets_at + 8 * key
                transpose(own + 4 * d * lanes, 4 * lanes, place, offsets_of_keys, size, flat[0])
                ask_ahead(kv, ahead, key, key + LANES, d, size)
    else:
        rows = floats(panel, KEYS // lanes * dim, lanes)
        for key in range(begin, count):
            source = flat[offsets[key] : offsets[key] + np.uint64(dim)]
            for d in range(dim):
                rows[key // lanes * dim + d, key % lanes] = widen(source[d])


@vectorized
def spread_values(
    panel: Any, kv: Any, flat: Any, offsets: Any, begin: Any, seen: Any, ahead: Any, dim: Any, lanes: Any
) -> None:
    """Panels of `lanes` dimensions; zeros before the first key seen: those values are read, and weigh nothing."""
    (first, end), size = seen, flat.itemsize
    rows = floats(panel, (dim + lanes - 1) // lanes * KEYS, lanes)
    for key in range(begin, end):
        for d in range(0, dim, CACHE_LINE // size):
            ask_ahead(kv, ahead, key, key + 1, d, size)
        for column in range((dim + lanes - 1) // lanes):
            own, begin = rows[column * KEYS + key], offsets[key] + np.uint64(column * lanes)
            source = flat[begin : begin + np.uint64(min(lanes, dim - column * lanes))]
            if key < first:
                own[:] = NOTHING
            else:
                for d in range(len(source)):
                    own[d] = widen(source[d])


@vectorized
def pair_keys(panel: Any, kv: Any, offsets_at: Any, begin: Any, count: Any, ahead: Any, dim: Any) -> None:
    """One panel of KEYS keys."""
    for key in range(begin // LANES * LANES, count, LANES):
        for d in range(0, dim, 2 * LANES):
            own = panel + 2 * d * KEYS + 4 * key
            transpose(own, 4 * KEYS, kv + 2 * d, offsets_at + 8 * key, 2, UNWIDENED)
            ask_ahead(kv, ahead, key, key + LANES, d, 2)


@vectorized
def pair_values(
    panel: Any, kv: Any, offsets: Any, begin: Any, seen: Any, ahead: Any, step: Any, zeros: Any, dim: Any, lanes: Any
) -> None:
    """Panels of `lanes` dimensions, whole steps of keys; zeros, at an address, for keys not in [first, end) = seen."""
    first, end = seen
    for low in range(begin // 2 * 2, (end + step - 1) // step * step, 2):
        sees_low, sees_high = first <= low < end, first <= low + 1 < end
        for column in range(0, dim, lanes):
            for d in range(column, column + lanes, 2 * LANES):
                lows = kv + 2 * (np.int64(offsets[low]) + d) if sees_low else zeros
                highs = kv + 2 * (np.int64(offsets[low + 1]) + d) if sees_high else zeros
                own = panel + 2 * (column * KEYS + low * lanes + 2 * (d - column))
                interleave(own, lows, highs)
                ask_ahead(kv, ahead, low, low + 2, d, 2)
