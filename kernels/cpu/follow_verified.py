"""kernels/reference/follow_verified.py, compiled."""

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

Arguments = arguments_of(
    *("packed", "lengths", "last_token_ids", "token_ids", "num_accepted", "num_draft_tokens", "said"),  # said 0: none
    *("num_requests", "width", "vocab_size"),
)


@cache
def following() -> Kernel:
    def follow(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        packed, lengths = integers(a.packed, a.num_requests * (a.width + 2)), integers(a.lengths, a.num_requests)
        last, gained = integers(a.last_token_ids, a.num_requests * 2), integers(a.token_ids, a.num_requests * a.width)
        num_accepted = integers(a.num_accepted, a.num_requests)
        num_drafts = integers(a.num_draft_tokens, a.num_requests)
        said = carray(pointer(a.said), (a.num_requests, a.vocab_size), np.int32)  # not read where there is none
        for request in range(part, a.num_requests, num_parts):
            own, accepted, place = request * a.width, num_accepted[request], request * (a.width + 2)
            for step in range(a.width):
                packed[place + step] = gained[own + step]
            packed[place + a.width], packed[place + a.width + 1] = accepted, num_drafts[request]
            if lengths[request] > 0:
                last[2 * request] = gained[own + accepted - 1] if accepted > 0 else last[2 * request + 1]
                last[2 * request + 1] = gained[own + accepted]
                lengths[request] += accepted + 1
                for step in range(accepted + 1 if a.said else 0):
                    said[request, gained[own + step]] += np.int32(1)

    return Kernel(follow, Arguments)


def follow_verified(
    lengths: Tensor,  # [num_requests] int64
    last_token_ids: Tensor,  # [num_requests, 2] int64
    token_ids: Tensor,  # [num_requests, width] int64
    num_accepted: Tensor,  # [num_requests] int64
    num_draft_tokens: Tensor,  # [num_requests] int64
    said: Tensor | None = None,  # [num_requests, vocab] int32
) -> Tensor:  # [num_requests, width + 2] int64
    """All arguments contiguous."""
    tensors = (lengths, last_token_ids, token_ids, num_accepted, num_draft_tokens, said)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    num_requests, width = token_ids.shape
    packed = empty(num_requests, width + 2, dtype=torch.int64)
    following()(
        *(packed.data_ptr(), *(0 if tensor is None else tensor.data_ptr() for tensor in tensors)),
        *(num_requests, width, 0 if said is None else said.shape[1]),
    )
    return packed
