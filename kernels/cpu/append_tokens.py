"""kernels/reference/append_tokens.py, compiled; nothing is written for nobody."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers, pointer

Arguments = arguments_of(
    *("token_ids", "lengths", "slots", "new_token_ids"),
    *("num_slots", "width", "num_rows", "number", "new_stride"),
)


@cache
def appending() -> Kernel:
    def append(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        token_ids = carray(pointer(a.token_ids), (a.num_slots, a.width), np.int32)
        lengths, slots = integers(a.lengths, a.num_slots), integers(a.slots, a.num_rows)
        for row in range(part, a.num_rows, num_parts):
            new, slot, place = integers(a.new_token_ids + 8 * row * a.new_stride, a.number), slots[row], 0
            while slot >= 0 and place < a.number and new[place] >= 0:
                token_ids[slot, min(lengths[slot], a.width - 1)] = np.int32(new[place])
                lengths[slot] += 1
                place += 1

    return Kernel(append, Arguments)


def append_tokens(
    token_ids: Tensor,  # [num_slots, width] int32
    lengths: Tensor,  # [num_slots] int64
    slots: Tensor,  # [B] int64, no two alike but those of nobody
    new_token_ids: Tensor,  # [B, number] int64, rows any distance apart
) -> None:
    assert token_ids.dtype == torch.int32 and all(own.is_contiguous() for own in (token_ids, lengths, slots))
    number = new_token_ids.shape[1]
    assert number <= 1 or new_token_ids.stride(1) == 1
    appending()(
        *(tensor.data_ptr() for tensor in (token_ids, lengths, slots, new_token_ids)),
        *(*token_ids.shape, len(slots), number, new_token_ids.stride(0)),
    )
