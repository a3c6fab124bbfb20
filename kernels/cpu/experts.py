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

from kernels.cpu.compiled import exact
from kernels.cpu.elements import ELEMENTS, elements, narrow, widen
from kernels.cpu.exp2 import LOG2_E, exp2
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference.experts import Routing

ZERO, TAKEN = np.float32(0.0), np.float32(-1.0)  # TAKEN: below every probability
PART_NUMBERS = 1 << 13  # of results, added up in some microseconds
PART_EXPERTS = 1 << 11  # looked at in some microseconds, over all choices
Choosing = arguments_of("weights", "chosen", "probs", "logits", "num_rows", "num_experts", "choices", "is_normalized")
Sorting = arguments_of("places", "rows", "starts", "next", "chosen", "num_rows", "num_experts", "choices")
Summing = arguments_of("sums", "results", "places", "weights", "num_rows", "width", "choices")


def choose_experts(arguments: Any, part: int, num_parts: int, thread: int) -> None:
    a = carray(arguments, 1, Choosing)[0]
    logits, all_probs = floats(a.logits, a.num_rows, a.num_experts), floats(a.probs, a.num_rows, a.num_experts)
    weights, chosen = floats(a.weights, a.num_rows, a.choices), integers(a.chosen, a.num_rows * a.choices)
    for row in range(a.num_rows * part // num_parts, a.num_rows * (part + 1) // num_parts):
        own, probs = logits[row], all_probs[row]
        largest = own[0]
        for expert in range(1, a.num_experts):
            largest = max(largest, own[expert])
        total = ZERO
        for expert in range(a.num_experts):
            probs[expert] = exp2((own[expert] - largest) * LOG2_E)
            total += probs[expert]
        for expert in range(a.num_experts):
            probs[expert] /= total
        total = ZERO
        for choice in range(a.choices):
            best = -1  # the first of those that are left, where no probability is a number
            for expert in range(a.num_experts):
                if probs[expert] != TAKEN and (best < 0 or probs[expert] > probs[best]):
                    best = expert
            weights[row, choice], chosen[row * a.choices + choice] = probs[best], best
            total += probs[best]
            probs[best] = TAKEN
        if a.is_normalized:
            for choice in range(a.choices):
                weights[row, choice] /= total


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
def add_in_order(sums: Any, results: Any, places: Any, weights: Any) -> None:
    for column in range(len(sums)):
        total = widen(results[places[0], column]) * weights[0]
        for choice in range(1, len(places)):
            total = total + widen(results[places[choice], column]) * weights[choice]
        sums[column] = narrow(total, sums[column])


@cache
def results_adding(element: Any) -> Kernel:
    """Of tensors of these elements."""

    def add_results(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Summing)[0]
        count = a.num_rows * a.choices
        sums, results = elements(a.sums, a.num_rows, a.width, element), elements(a.results, count, a.width, element)
        places, weights = integers(a.places, count), floats(a.weights, a.num_rows, a.choices)
        for row in range(a.num_rows * part // num_parts, a.num_rows * (part + 1) // num_parts):
            add_in_order(sums[row], results, places[row * a.choices : (row + 1) * a.choices], weights[row])

    return Kernel(add_results, Summing)


def route(logits: Tensor, choices: int, *, is_normalized: bool) -> Routing:
    """The experts of each row; logits: [num_rows, num_experts] float32."""
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    num_rows, num_experts = logits.shape
    weights, chosen = empty(num_rows, choices), empty(num_rows, choices, dtype=torch.int64)
    probs = empty(num_rows, num_experts)
    choosing()(
        *(weights.data_ptr(), chosen.data_ptr(), probs.data_ptr(), logits.data_ptr()),
        *(num_rows, num_experts, choices, int(is_normalized)),
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


def sum_of_experts(results: Tensor, routing: Routing) -> Tensor:
    """[num_places, width] -> [num_rows, width]."""
    assert results.is_contiguous()
    (num_rows, choices), width = routing.places.shape, results.shape[1]
    sums = empty(num_rows, width, dtype=results.dtype)
    results_adding(ELEMENTS[results.dtype])(
        *(sums.data_ptr(), results.data_ptr(), routing.places.data_ptr(), routing.weights.data_ptr()),
        *(num_rows, width, choices),
        parts=parts_of(results.numel(), PART_NUMBERS, max(num_rows, 1)),
    )
    return sums
