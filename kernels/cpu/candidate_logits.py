"""kernels/reference/candidate_logits.py, a row's candidate at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.cluster_logits import outside
from kernels.cpu.compiled import vectorized
from kernels.cpu.elements import ELEMENTS, elements, widen
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers
from kernels.cpu.threads import parts_of

Arguments = arguments_of(
    *("logits", "unary", "candidates", "hidden", "predecessors", "successors", "token_ids"),
    *("num_rows", "num_owners", "num_candidates", "vocab_size", "rank"),
    *("unary_stride", "candidates_stride", "hidden_stride", "tokens_stride"),
)
CHUNK = 32  # numbers added up by themselves: one sum after all others would carry their roundings
PART_WORK = 1 << 13  # multiplied, in some microseconds


@vectorized
def product(before: Any, hidden: Any, behind: Any) -> Any:
    total, rank = np.float32(0.0), len(before)
    for first in range(0, rank, CHUNK):
        part = np.float32(0.0)
        for column in range(first, min(first + CHUNK, rank)):
            part += widen(before[column]) * widen(hidden[column]) * widen(behind[column])
        total += part
    return total


@cache
def candidates_scoring(element: Any) -> Kernel:
    """By tables of these elements."""

    def score(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        logits, unary = floats(a.logits, a.num_rows, a.vocab_size), floats(a.unary, a.num_owners, a.unary_stride)
        candidates = integers(a.candidates, a.num_owners * a.candidates_stride)
        hidden = elements(a.hidden, a.num_owners, a.hidden_stride, element)
        predecessors = elements(a.predecessors, a.vocab_size, a.rank, element)
        successors = elements(a.successors, a.vocab_size, a.rank, element)
        token_ids, num_each = integers(a.token_ids, a.num_rows * a.tokens_stride), a.num_rows // a.num_owners
        for pair in range(part, a.num_rows * a.num_candidates, num_parts):
            row, place = pair // a.num_candidates, pair % a.num_candidates
            owner = row // num_each
            candidate = candidates[owner * a.candidates_stride + place]
            own = product(
                predecessors[token_ids[row * a.tokens_stride]], hidden[owner, : a.rank], successors[candidate]
            )
            logits[row, candidate] = unary[owner, place] + own

    return Kernel(score, Arguments)


def candidate_logits(
    unary: Tensor, candidates: Tensor, hidden: Tensor, predecessors: Tensor, successors: Tensor, token_ids: Tensor
) -> Tensor:
    """Rows of the first three, and tokens, may lie any distance apart; the tables are contiguous."""
    assert unary.stride(1) == candidates.stride(1) == hidden.stride(1) == 1
    assert predecessors.is_contiguous() and successors.is_contiguous() and predecessors.shape == successors.shape
    assert hidden.dtype == predecessors.dtype == successors.dtype and unary.dtype == torch.float32
    assert candidates.dtype == token_ids.dtype == torch.int64
    num_rows, (num_owners, num_candidates), (vocab_size, rank) = len(token_ids), candidates.shape, successors.shape
    logits = outside(num_rows, vocab_size)
    pairs = num_rows * num_candidates
    candidates_scoring(ELEMENTS[successors.dtype])(
        *(own.data_ptr() for own in (logits, unary, candidates, hidden, predecessors, successors, token_ids)),
        *(num_rows, num_owners, num_candidates, vocab_size, rank),
        *(unary.stride(0), candidates.stride(0), hidden.stride(0), token_ids.stride(0)),
        parts=parts_of(pairs * rank, PART_WORK, pairs),
    )
    return logits
