"""kernels/reference/top_logprobs.py, compiled: the likeliest are found as for draft trees (top_candidates.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.compiled import exact
from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.philox import log
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.cpu.top_candidates import LOW_WORD, NEG_INF, PART_COLUMNS, key_of, mass_of, score_of, select
from kernels.reference.top_logprobs import num_columns

Arguments = arguments_of("packed", "keys", "logits", "token_ids", "num_rows", "row_stride", "vocab_size", "num_top")
ONE = np.float64(1.0)


@exact
def key_and_rank(row: Any, token: Any) -> Any:
    """Of one token: (its key, how many tokens have none that is lower)."""
    key, rank = key_of(row[token], token), 0
    for other in range(len(row)):
        rank += key_of(row[other], other) >= key
    return key, rank


@exact
def log_prob_of(score: Any, total: Any) -> Any:
    """A float32."""
    return np.float32(min(np.float64(score) - total, 0.0)) if score > NEG_INF else NEG_INF


@cache
def telling() -> Kernel:
    def tell(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        width = 3 + 2 * a.num_top
        packed = carray(pointer(a.packed), (a.num_rows, width), np.float64)
        logits, token_ids = floats(a.logits, a.num_rows, a.row_stride), integers(a.token_ids, a.num_rows)
        for row in range(part, a.num_rows, num_parts):
            own, out = logits[row, : a.vocab_size], packed[row]
            keys = integers(a.keys + 8 * row * (a.num_top + 1), a.num_top + 1)  # one of them to find the highest
            select(keys[: max(a.num_top, 1)], own, keys, False)
            highest = np.float64(score_of(keys[0]))
            total = highest + log(mass_of(own, highest, ONE)) if highest > NEG_INF else highest
            key, rank = key_and_rank(own, token_ids[row])
            out[0], out[1], out[2] = token_ids[row], log_prob_of(score_of(key), total), rank
            for place in range(a.num_top):
                out[3 + place] = LOW_WORD - (keys[place] & LOW_WORD)
                out[3 + a.num_top + place] = log_prob_of(score_of(keys[place]), total)

    return Kernel(tell, Arguments)


def top_logprobs(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    token_ids: Tensor,  # [num_rows] int64
    num_top: int,
) -> Tensor:  # [num_rows, num_columns(num_top)] float64
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and token_ids.is_contiguous()
    num_rows, vocab_size = logits.shape
    assert num_top <= vocab_size
    packed = empty(num_rows, num_columns(num_top), dtype=torch.float64)
    keys = empty(num_rows * (num_top + 1), dtype=torch.int64)
    telling()(
        *(tensor.data_ptr() for tensor in (packed, keys, logits, token_ids)),
        *(num_rows, logits.stride(0), vocab_size, num_top),
        parts=parts_of(num_rows * vocab_size, PART_COLUMNS, num_rows),
    )
    return packed
