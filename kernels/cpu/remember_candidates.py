"""kernels/reference/remember_candidates.py, compiled; nothing is written for nobody."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers
from kernels.cpu.threads import parts_of

NEG_INF, UNTOLD = np.float32("-inf"), np.float32("inf")  # no logarithm of a probability is as high
PART_NUMBERS = 1 << 11  # copied in some microseconds
Arguments = arguments_of(
    *("table_token_ids", "table_log_probs", "token_ids", "candidates", "log_probs"),
    *("table_rows", "num_rows", "width"),
)


@cache
def remembering() -> Kernel:
    def remember(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        token_ids = integers(a.token_ids, a.num_rows)
        known, candidates = (
            integers(a.table_token_ids, a.table_rows * a.width),
            integers(a.candidates, a.num_rows * a.width),
        )
        known_log_probs = floats(a.table_log_probs, a.table_rows, a.width)
        log_probs = floats(a.log_probs, a.num_rows, a.width)
        for row in range(a.num_rows):
            if token_ids[row] >= 0 and token_ids[row] % num_parts == part:  # a token's rows are one part's
                known_log_probs[token_ids[row], 0] = UNTOLD
        for row in range(a.num_rows):
            token_id = token_ids[row]
            if token_id < 0 or token_id % num_parts != part:
                continue
            told, own = known_log_probs[token_id, 0], log_probs[row, 0]
            is_surer = own == own and (told != told or own > told)  # NaN is as -inf, of which the first counts
            if told != UNTOLD and not (is_surer and own > NEG_INF):
                continue
            for place in range(a.width):
                known[token_id * a.width + place] = candidates[row * a.width + place]
                known_log_probs[token_id, place] = log_probs[row, place]

    return Kernel(remember, Arguments)


def remember_candidates(
    table_token_ids: Tensor,  # [vocab + 1, width] int64
    table_log_probs: Tensor,  # [vocab + 1, width] float32
    token_ids: Tensor,  # [num_rows] int64, -1: nobody's
    candidates: Tensor,  # [num_rows, width] int64
    log_probs: Tensor,  # [num_rows, width] float32, descending
) -> None:
    tensors = (table_token_ids, table_log_probs, token_ids, candidates, log_probs)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert table_log_probs.dtype == log_probs.dtype == torch.float32
    remembering()(
        *(tensor.data_ptr() for tensor in tensors),
        *(len(table_token_ids), *candidates.shape),
        parts=parts_of(candidates.numel(), PART_NUMBERS, len(candidates)),
    )
