"""kernels/reference/follow_verified.py in one launch: a program for each request."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.sizes import next_power_of_2


@Kernel
@triton.jit(do_not_specialize=["width", "vocab_size"], do_not_specialize_on_alignment=["num_draft_tokens_ptr"])
def follow_kernel(
    packed_ptr,  # [num_requests, width + 2] int64
    lengths_ptr,  # [num_requests] int64
    last_token_ids_ptr,  # [num_requests, 2] int64
    token_ids_ptr,  # [num_requests, width] int64
    num_accepted_ptr,  # [num_requests] int64
    num_draft_tokens_ptr,  # [num_requests] int64
    said_ptr,  # [num_requests, vocab_size] int32, or None
    width,
    vocab_size,
    WIDTH: tl.constexpr,  # >= width + 2
):
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    own_ptr = token_ids_ptr + request * width
    accepted = tl.load(num_accepted_ptr + request)
    token_ids = tl.load(own_ptr + place, mask=place < width, other=-1)
    packed = tl.where(place == width, accepted, token_ids)
    packed = tl.where(place == width + 1, tl.load(num_draft_tokens_ptr + request), packed)
    tl.store(packed_ptr + request * (width + 2) + place, packed, mask=place < width + 2)
    length = tl.load(lengths_ptr + request)
    if length > 0:
        last_ptr = last_token_ids_ptr + request * 2
        before = tl.load(last_ptr + 1)
        if accepted > 0:
            before = tl.load(own_ptr + accepted - 1)
        tl.store(last_ptr, before)
        tl.store(last_ptr + 1, tl.load(own_ptr + accepted))
        tl.store(lengths_ptr + request, length + accepted + 1)
        if said_ptr is not None:  # a token may be there twice
            tl.atomic_add(said_ptr + request * vocab_size + token_ids, 1, mask=token_ids >= 0, sem="relaxed")


def follow_verified(
    lengths: Tensor,  # [num_requests] int64
    last_token_ids: Tensor,  # [num_requests, 2] int64
    token_ids: Tensor,  # [num_requests, width] int64
    num_accepted: Tensor,  # [num_requests] int64
    num_draft_tokens: Tensor,  # [num_requests] int64
    said: Tensor | None = None,  # [num_requests, vocab] int32
) -> Tensor:  # [num_requests, width + 2] int64
    """What kernels.reference.follow_verified.follow_verified does; all arguments contiguous."""
    num_requests, width = token_ids.shape
    tensors = (lengths, last_token_ids, token_ids, num_accepted, num_draft_tokens, said)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    packed = torch.empty(num_requests, width + 2, dtype=torch.int64, device=token_ids.device)
    if num_requests:
        follow_kernel[(num_requests,)](
            packed,
            lengths,
            last_token_ids,
            token_ids,
            num_accepted,
            num_draft_tokens,
            said,
            width,
            0 if said is None else said.shape[1],
            WIDTH=next_power_of_2(width + 2),
            num_warps=1,
        )
    return packed
