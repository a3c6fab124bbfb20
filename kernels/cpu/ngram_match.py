"""kernels/reference/ngram_match.py, compiled: each row's end compared with what lies before it, from the right."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers, pointer
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of

PART_TOKENS = 1 << 12  # searched in some microseconds
Arguments = arguments_of(
    *("drafts", "token_ids", "lengths", "slots", "num_rows", "num_slots", "row_stride"),
    *("min_n", "max_n", "num_tokens"),
)


@cache
def matching() -> Kernel:
    def match(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        drafts, slots = integers(a.drafts, a.num_rows * a.num_tokens), integers(a.slots, a.num_rows)
        lengths = integers(a.lengths, a.num_slots)
        for row in range(part, a.num_rows, num_parts):
            slot = max(slots[row], np.int64(0))
            length = lengths[slot] if slots[row] >= 0 else 0
            text = carray(pointer(a.token_ids + 4 * slot * a.row_stride), (length,), np.int32)
            longest, found, end = a.min_n - 1, 0, length - 1  # an occurrence ends where its draft begins
            while end > longest and longest < a.max_n:
                size = 0
                while size < min(end, a.max_n) and text[end - 1 - size] == text[length - 1 - size]:
                    size += 1
                if size > longest:
                    longest, found = size, end
                end -= 1
            for place in range(a.num_tokens):
                # A match so near the end that the draft reaches it is a period.
                draft = np.int64(text[found + place % (length - found)]) if found > 0 else -1
                drafts[row * a.num_tokens + place] = draft

    return Kernel(match, Arguments)


def ngram_match(
    token_ids: Tensor,  # [num_slots, width] int32, rows any distance apart
    lengths: Tensor,  # [num_slots] int64
    slots: Tensor,  # [B] int64; -1: none
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
) -> Tensor:
    assert token_ids.dtype == torch.int32 and (token_ids.shape[1] <= 1 or token_ids.stride(1) == 1)
    assert lengths.is_contiguous() and slots.is_contiguous() and min_n >= 1
    drafts = empty(len(slots), num_tokens, dtype=torch.int64)
    matching()(
        *(tensor.data_ptr() for tensor in (drafts, token_ids, lengths, slots)),
        *(len(slots), len(token_ids), token_ids.stride(0), min_n, max_n, num_tokens),
        parts=parts_of(len(slots) * token_ids.shape[1], PART_TOKENS, len(slots)),
    )
    return drafts
