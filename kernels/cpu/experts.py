"""kernels/reference/experts.py: which rows go to which experts, and what becomes of their results.

What depends on the routing is read inside kernels, so that a recorded step serves every routing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.bits import float_of_bits
from kernels.cpu.compiled import compiled, exact
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2
from kernels.cpu.kernel import Kernel, arguments_of, bits_of
from kernels.cpu.native import floats, integers
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference.experts import LEAST_TOTAL, Routing, RoutingRule

ZERO, ONE, NO_NUMBER = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
FIRST, TAKEN = np.float32(np.inf), np.float32(-np.inf)  # above every score, and below
LEAST = np.float32(LEAST_TOTAL)
PART_NUMBERS = 1 << 13  # of results, added up in some microseconds
PART_EXPERTS = 1 << 11  # looked at in some microseconds, over all choices
Choosing = arguments_of(
    *("weights", "chosen", "scores", "order", "logits", "corrections"),  # the last: where has_corrections
    *("num_rows", "num_experts", "choices", "is_softmax", "has_corrections", "is_normalized"),
    *("num_groups", "kept_groups"),
    "scale",  # the bits of a float32
    "factors",  # 0: there are none
)
Sorting = arguments_of("places", "rows", "starts", "next", "chosen", "num_rows", "num_experts", "choices")
Summing = arguments_of(
    *("sums", "results", "places", "weights", "shared", "room"),  # shared: 0, there is nothing
    *("num_rows", "width", "choices"),
)


@compiled
def drop_group(order: Any, num_groups: Any) -> None:
    """Of those whose scores are not taken the one with the lowest sum of its two best; of equals the last."""
    size, worst, lowest = len(order) // num_groups, 0, FIRST
    for group in range(num_groups):
        first, second = TAKEN, TAKEN
        for expert in range(group * size, (group + 1) * size):
            score = order[expert]
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        if first > TAKEN and first + second <= lowest:
            worst, lowest = group, first + second
    for expert in range(worst * size, (worst + 1) * size):
        order[expert] = TAKEN


def choose_experts(arguments: Any, part: int, num_parts: int, thread: int) -> None:
    a = carray(arguments, 1, Choosing)[0]
    logits, all_scores = floats(a.logits, a.num_rows, a.num_experts), floats(a.scores, a.num_rows, a.num_experts)
    weights, chosen = floats(a.weights, a.num_rows, a.choices), integers(a.chosen, a.num_rows * a.choices)
    orders, scale = floats(a.order, a.num_rows, a.num_experts), float_of_bits(np.int32(a.scale))
    corrections = floats(a.corrections, 1, a.num_experts)[0]
    factors = floats(a.factors, 1, a.num_experts if a.factors else 0)[0]
    for row in range(a.num_rows * part // num_parts, a.num_rows * (part + 1) // num_parts):
        own, scores, order = logits[row], all_scores[row], orders[row]
        if a.is_softmax:
            largest = own[0]
            for expert in range(1, a.num_experts):
                largest = max(largest, own[expert])
            total = ZERO
            for expert in range(a.num_experts):
                scores[expert] = exp2((own[expert] - largest) * LOG2_E)
                total += scores[expert]
            for expert in range(a.num_experts):
                if own[expert] - largest != own[expert] - largest:  # exp2 makes a number of what is none
                    total = NO_NUMBER
            for expert in range(a.num_experts):
                scores[expert] /= total
        else:
            for expert in range(a.num_experts):
                score = ONE / (ONE + exp2(own[expert] * -LOG2_E))
                scores[expert] = score if own[expert] == own[expert] else NO_NUMBER
        for expert in range(a.num_experts):
            corrected = scores[expert] + corrections[expert] if a.has_corrections else scores[expert]
            order[expert] = corrected if corrected == corrected else FIRST
        for _ in range(a.num_groups - a.kept_groups):
            drop_group(order, a.num_groups)
        total = ZERO
        for choice in range(a.choices):
            best = 0
            while order[best] == TAKEN:
                best += 1
            for expert in range(best + 1, a.num_experts):
                if order[expert] > order[best]:
                    best = expert
            weights[row, choice], chosen[row * a.choices + choice] = scores[best], best
            total += scores[best]
            order[best] = TAKEN
        for choice in range(a.choices):
            weight = weights[row, choice] / (total + LEAST) if a.is_normalized else weights[row, choice]
            weights[row, choice] = weight * scale
            if a.factors:
                weights[row, choice] *= factors[chosen[row * a.choices + choice]]


def sort_goings(arguments: Any, part: int, num_parts: int, thread: int) -> None:
    a = carray(arguments, 1, Sorting)[0]
    count = a.num_rows * a.choices
    places, rows, chosen = integers(a.places, count), integers(a.rows, count), integers(a.chosen, count)
    starts, following = integers(a.starts, a.num_experts + 1), integers(a.next, a.num_experts)
    for expert in range(a.num_experts):
        following[expert] = 0
    for index in range(count):
        following[chosen[index]] += 1
    starts[0] = 0
    for expert in range(a.num_experts):
        starts[expert + 1] = starts[expert] + following[expert]
        following[expert] = starts[expert]
    for index in range(count):
        place = following[chosen[index]]
        following[chosen[index]] = place + 1
        places[index], rows[place] = place, index // a.choices


@cache
def choosing() -> Kernel:
    return Kernel(choose_experts, Choosing)


@cache
def sorting() -> Kernel:
    return Kernel(sort_goings, Sorting)


@exact
def weigh(sums: Any, result: Any, weight: Any) -> None:
    for column in range(len(sums)):
        sums[column] = widen(result[column]) * weight


@exact
def add_weighed(sums: Any, result: Any, weight: Any) -> None:
    for column in range(len(sums)):
        sums[column] = sums[column] + widen(result[column]) * weight


@exact
def add_and_round(rounded: Any, sums: Any, shared: Any) -> None:
    if len(shared) > 0:
        for column in range(len(sums)):
            rounded[column] = narrow(sums[column] + widen(shared[column]), rounded[column])
    else:
        for column in range(len(sums)):
            rounded[column] = narrow(sums[column], rounded[column])


@cache
def results_adding(element: Any) -> Kernel:
    """Of tensors of these elements. One choice after another, in vector lanes."""

    def add_results(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Summing)[0]
        count = a.num_rows * a.choices
        sums, results = elements(a.sums, a.num_rows, a.width, element), elements(a.results, count, a.width, element)
        places, weights = integers(a.places, count), floats(a.weights, a.num_rows, a.choices)
        shared = elements(a.shared, a.num_rows, a.width if a.shared else 0, element)
        total = floats(a.room, thread + 1, a.width)[thread]
        for row in range(a.num_rows * part // num_parts, a.num_rows * (part + 1) // num_parts):
            own = places[row * a.choices : (row + 1) * a.choices]
            weigh(total, results[own[0]], weights[row, 0])
            for choice in range(1, a.choices):
                add_weighed(total, results[own[choice]], weights[row, choice])
            add_and_round(sums[row], total, shared[row])

    return Kernel(add_results, Summing)


def route(
    logits: Tensor, rule: RoutingRule, corrections: Tensor | None = None, factors: Tensor | None = None
) -> Routing:
    """The experts of each row; logits: [num_rows, num_experts] float32; the others, where given, [num_experts]."""
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    (num_rows, num_experts), choices = logits.shape, rule.choices
    assert num_experts % rule.num_groups == 0
    for given in (corrections, factors):
        assert given is None or (given.dtype == torch.float32 and given.is_contiguous() and len(given) == num_experts)
    weights, chosen = empty(num_rows, choices), empty(num_rows, choices, dtype=torch.int64)
    scores, order = empty(num_rows, num_experts), empty(num_rows, num_experts)
    choosing()(
        *(weights.data_ptr(), chosen.data_ptr(), scores.data_ptr(), order.data_ptr(), logits.data_ptr()),
        logits.data_ptr() if corrections is None else corrections.data_ptr(),
        *(num_rows, num_experts, choices),
        *(rule.scores == "softmax", corrections is not None, rule.is_normalized),
        *(rule.num_groups, rule.kept_groups),
        bits_of(rule.scale),
        0 if factors is None else factors.data_ptr(),
        parts=parts_of(logits.numel() * (choices + 2), PART_EXPERTS, max(num_rows, 1)),
    )
    return sort_by_expert(chosen, weights, num_experts)


def sort_by_expert(chosen: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Of rows whose experts are chosen: [num_rows, choices] int64, and their weights float32, both contiguous."""
    assert chosen.is_contiguous() and chosen.dtype == torch.int64
    num_rows, choices = chosen.shape
    places, rows = empty(num_rows, choices, dtype=torch.int64), empty(num_rows * choices, dtype=torch.int64)
    starts, following = empty(num_experts + 1, dtype=torch.int64), empty(num_experts, dtype=torch.int64)
    sorting()(
        *(places.data_ptr(), rows.data_ptr(), starts.data_ptr(), following.data_ptr(), chosen.data_ptr()),
        *(num_rows, num_experts, choices),
    )
    return Routing(weights, places, rows, starts)


def sum_of_experts(results: Tensor, routing: Routing, shared: Tensor | None = None) -> Tensor:
    """[num_places, width] -> [num_rows, width]; shared: [num_rows, width]."""
    (num_rows, choices), width = routing.places.shape, results.shape[1]
    assert results.is_contiguous() and (shared is None or shared.is_contiguous())
    assert shared is None or (shared.shape == (num_rows, width) and shared.dtype == results.dtype)
    sums, room = empty(num_rows, width, dtype=results.dtype), empty(torch.get_num_threads() * width)
    results_adding(ELEMENTS[results.dtype])(
        *(sums.data_ptr(), results.data_ptr(), routing.places.data_ptr(), routing.weights.data_ptr()),
        *(0 if shared is None else shared.data_ptr(), room.data_ptr()),
        *(num_rows, width, choices),
        parts=parts_of(results.numel(), PART_NUMBERS, max(num_rows, 1)),
    )
    return sums
