"""kernels/reference/fit_drafts.py, compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers
from kernels.cpu.recording import empty

Arguments = arguments_of(
    *("fitting", "rows", "drafts", "last_token_ids", "lengths", "limits"),
    *("num_requests", "num_drafts", "draft_stride", "last_stride"),
)


@cache
def fitting() -> Kernel:
    def fit(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        kept, rows = integers(a.fitting, a.num_requests * a.num_drafts), a.num_drafts + 1
        token_ids, drafts = integers(a.rows, a.num_requests * rows), integers(a.drafts, a.num_requests * a.draft_stride)
        last = integers(a.last_token_ids, a.num_requests * a.last_stride)
        lengths, limits = integers(a.lengths, a.num_requests), integers(a.limits, a.num_requests)
        for request in range(part, a.num_requests, num_parts):
            room = limits[request] - lengths[request] - 1
            token_ids[request * rows] = last[request * a.last_stride]
            for place in range(a.num_drafts):
                draft = drafts[request * a.draft_stride + place] if place < room else -1
                kept[request * a.num_drafts + place] = draft
                token_ids[request * rows + 1 + place] = max(draft, 0)

    return Kernel(fit, Arguments)


def fit_drafts(
    draft_token_ids: Tensor,  # [num_requests, num_drafts] int64, rows any distance apart
    last_token_ids: Tensor,  # [num_requests] int64, any distance apart
    lengths: Tensor,  # [num_requests] int64
    limits: Tensor,  # [num_requests] int64
) -> tuple[Tensor, Tensor]:
    num_requests, num_drafts = draft_token_ids.shape
    assert lengths.is_contiguous() and limits.is_contiguous() and (num_drafts <= 1 or draft_token_ids.stride(1) == 1)
    kept = empty(num_requests, num_drafts, dtype=torch.int64)
    rows = empty(num_requests, num_drafts + 1, dtype=torch.int64)
    fitting()(
        *(tensor.data_ptr() for tensor in (kept, rows, draft_token_ids, last_token_ids, lengths, limits)),
        *(num_requests, num_drafts, draft_token_ids.stride(0), last_token_ids.stride(0)),
    )
    return kept, rows
