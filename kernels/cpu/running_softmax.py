"""The softmax of kernels/cpu/attend.py: weights of some keys after others, with a running maximum and a running sum.

A row begins with nothing found, or with its head's sink, a score that takes weight and brings nothing (gpt-oss).
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.cpu.bits import bits_of_float, float_of_bits, ordered
from kernels.cpu.compiled import inlined, vectorized
from kernels.cpu.elements import narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2, tanh
from kernels.cpu.key_panels import KEYS
from kernels.cpu.seen_keys import keys_from

NOTHING, WHOLE, LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-3.0e38)
SMALLEST = np.float32(2.0**-126)  # normal number: a matrix unit takes smaller ones for zero


@vectorized
def begin_rows(
    wanted: Any, totals: Any, place: Any, queries: Any, sinks: Any, first_row: Any, size: Any, first: Any, heads: Any
) -> None:
    """The heads of one row of a tile after another, from `place` on: nothing is found yet but their sinks."""
    dim = wanted.shape[1]
    for row in range(heads * size):
        totals[0, place + row], totals[1, place + row] = LOWEST, NOTHING
        if len(sinks):
            totals[0, place + row], totals[1, place + row] = sinks[first + row % heads] * LOG2_E, WHOLE
        column = (first + row % heads) * dim
        own, query = wanted[place + row], queries[first_row + row // heads, column : column + dim]
        for d in range(dim):
            own[d] = narrow(widen(query[d]), own[d])


@inlined
def weigh(weights: Any, scores: Any, largest: Any, scale: Any, cap: Any, count: Any) -> Any:
    """Weights of as many keys; the largest score so far, and the sum of the weights."""
    total, found = NOTHING, ordered(bits_of_float(largest))
    for key in range(count):
        scores[key] *= scale
    if cap != NOTHING:
        for key in range(count):
            scores[key] = cap * tanh(scores[key])
    for key in range(count):
        own = ordered(bits_of_float(scores[key]))
        found = own if own > found else found
    largest = float_of_bits(ordered(found))
    for key in range(count):
        weight = exp2(scores[key] - largest)
        weights[key] = narrow(weight, weights[key])
        total += weight
    return largest, total


@inlined
def weigh_seen(weights: Any, scores: Any, first: Any, end: Any, largest: Any, scale: Any, cap: Any) -> Any:
    """Keys in [first, end); others have no weight."""
    if first == 0 and end == KEYS:
        return weigh(weights, scores, largest, scale, cap, KEYS)  # a number that the compiler knows
    nothing = narrow(NOTHING, weights[0])
    weights[:first] = nothing
    weights[end:] = nothing
    return weigh(weights[first:end], scores[first:end], largest, scale, cap, end - first)


@vectorized
def weigh_rows(
    a: Any,
    weights: Any,
    scores: Any,
    results: Any,
    place: Any,
    totals: Any,
    tile: Any,
    first: Any,
    heads: Any,
    start: Any,
) -> Any:
    """Keys from `start` on for heads of a tile's rows, from the first-th on; how many of these keys any of them sees.

    results: [columns, rows of a turn, lanes] so far, theirs from `place` on, and totals [2, theirs], a largest score
    and a sum of weights each.
    """
    scale, cap, most = float_of_bits(np.int32(a.scale)), float_of_bits(np.int32(a.cap)), np.int64(0)
    own, head = first // heads, first % heads
    low, high = keys_from(a, tile, own, start)
    for row in range(totals.shape[1]):
        if head == heads:
            own, head = own + 1, np.int64(0)
            low, high = keys_from(a, tile, own, start)
        head, most, before = head + 1, max(most, high), totals[0, row]
        largest, total = weigh_seen(weights[row], scores[row], low, high, before, scale, cap)
        if largest != before:
            kept = exp2(before - largest)
            totals[0, row], totals[1, row] = largest, totals[1, row] * kept
            for column in range(results.shape[0]):
                result = results[column, place + row]
                for d in range(results.shape[2]):
                    result[d] *= kept
        totals[1, row] += total
    return most


@vectorized
def end_rows(
    output: Any, results: Any, totals: Any, first_row: Any, size: Any, first: Any, heads: Any, dim: Any, scale: Any
) -> None:
    """What they found: of results [turns, columns, rows of a turn, lanes] and totals, of these rows alone.

    scale: of values."""
    _, columns, turn_rows, lanes = results.shape
    for row in range(heads * size):
        total, begin = totals[1, row], (first + row % heads) * dim
        for column in range(columns):
            result, low = results[row // turn_rows, column, row % turn_rows], begin + column * lanes
            out = output[first_row + row // heads, low : min(low + lanes, begin + dim)]
            for d in range(len(out)):
                number = NOTHING if abs(result[d]) < SMALLEST else result[d]
                out[d] = narrow(number / total * scale, out[d])
