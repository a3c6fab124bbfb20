"""kernels/reference/cluster_logits.py, a row's cluster at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import ELEMENTS, elements, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference.cluster_logits import OUTSIDE

Filling = arguments_of("logits", "num_rows", "vocab_size")
Arguments = arguments_of(
    *("logits", "states", "table", "token_ids", "chosen"),
    *("num_rows", "num_chosen", "num_clusters", "size", "hidden", "states_stride"),
)
FILL = np.float32(OUTSIDE)
PART_NUMBERS, PART_WORK = 1 << 14, 1 << 14  # written, and multiplied, in some microseconds


@vectorized
def product(state: Any, weights: Any) -> Any:
    total = np.float32(0.0)
    for column in range(len(weights)):
        total += widen(state[column]) * widen(weights[column])
    return total


@cache
def rows_filling() -> Kernel:
    def fill(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Filling)[0]
        count = a.num_rows * a.vocab_size
        numbers = floats(a.logits, 1, count)[0]
        for index in range(count * part // num_parts, count * (part + 1) // num_parts):
            numbers[index] = FILL

    return Kernel(fill, Filling)


@cache
def clusters_multiplying(element: Any) -> Kernel:
    """By weights of these elements."""

    def multiply(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        vocab_size = a.num_clusters * a.size
        logits, states = (
            floats(a.logits, a.num_rows, vocab_size),
            elements(a.states, a.num_rows, a.states_stride, element),
        )
        table, token_ids = elements(a.table, vocab_size, a.hidden, element), integers(a.token_ids, vocab_size)
        chosen = integers(a.chosen, a.num_rows * a.num_chosen)
        for choice in range(part, a.num_rows * a.num_chosen, num_parts):
            row, first = choice // a.num_chosen, chosen[choice] * a.size
            own, state = logits[row], states[row, : a.hidden]
            for place in range(first, first + a.size):
                own[token_ids[place]] = product(state, table[place])

    return Kernel(multiply, Arguments)


def outside(num_rows: int, vocab_size: int) -> Tensor:
    """Logits [num_rows, vocab_size] of which none is a token's yet."""
    logits = empty(num_rows, vocab_size)
    rows_filling()(logits.data_ptr(), *logits.shape, parts=parts_of(logits.numel(), PART_NUMBERS, logits.numel()))
    return logits


def cluster_logits(states: Tensor, table: Tensor, token_ids: Tensor, chosen: Tensor) -> Tensor:
    """states: [num_rows, hidden], whose rows may lie further apart; the other arguments are contiguous."""
    assert states.stride(1) == 1 and table.is_contiguous() and token_ids.is_contiguous() and chosen.is_contiguous()
    assert states.dtype == table.dtype and token_ids.dtype == chosen.dtype == torch.int64
    (num_rows, num_chosen), (num_clusters, size, hidden) = chosen.shape, table.shape
    logits = outside(num_rows, num_clusters * size)
    choices = num_rows * num_chosen
    clusters_multiplying(ELEMENTS[table.dtype])(
        *(tensor.data_ptr() for tensor in (logits, states, table, token_ids, chosen)),
        *(num_rows, num_chosen, num_clusters, size, hidden, states.stride(0)),
        parts=parts_of(choices * size * hidden, PART_WORK, choices),
    )
    return logits
