"""kernels/reference/fit_drafts.py in one launch: a program for each request."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.sizes import next_power_of_2


@Kernel
@triton.jit(do_not_specialize=["last_stride", "num_drafts"])
def fit_kernel(
    fitting_ptr,  # [num_requests, num_drafts] int64
    rows_ptr,  # [num_requests, num_drafts + 1] int64
    drafts_ptr,  # [num_requests, num_drafts] int64
    last_token_ids_ptr,  # [num_requests] int64, last_stride apart
    lengths_ptr,  # [num_requests] int64
    limits_ptr,  # [num_requests] int64
    last_stride,
    num_drafts,
    PLACES: tl.constexpr,  # >= num_drafts
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    is_draft = place < num_drafts
    room = tl.load(limits_ptr + request) - tl.load(lengths_ptr + request) - 1
    draft = tl.load(drafts_ptr + request * num_drafts + place, mask=is_draft & (place < room), other=-1)
    tl.store(fitting_ptr + request * num_drafts + place, draft, mask=is_draft)
    row_ptr = rows_ptr + request * (num_drafts + 1)
    tl.store(row_ptr, tl.load(last_token_ids_ptr + request * last_stride))
    tl.store(row_ptr + 1 + place, tl.maximum(draft, 0), mask=is_draft)


def fit_drafts(
    draft_token_ids: Tensor,  # [num_requests, num_drafts] int64
    last_token_ids: Tensor,  # [num_requests] int64, any distance apart
    lengths: Tensor,  # [num_requests] int64
    limits: Tensor,  # [num_requests] int64
) -> tuple[Tensor, Tensor]:
    """What kernels.reference.fit_drafts.fit_drafts says."""
    num_requests, num_drafts = draft_token_ids.shape
    assert draft_token_ids.is_contiguous() and lengths.is_contiguous() and limits.is_contiguous()
    fitting = torch.empty_like(draft_token_ids)
    rows = torch.empty(num_requests, num_drafts + 1, dtype=torch.int64, device=lengths.device)
    if num_requests:
        fit_kernel[(num_requests,)](
            fitting,
            rows,
            draft_token_ids,
            last_token_ids,
            lengths,
            limits,
            last_token_ids.stride(0),
            num_drafts,
            PLACES=next_power_of_2(max(num_drafts, 1)),
            num_warps=1,
        )
    return fitting, rows
