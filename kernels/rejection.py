"""Ragged chains of drafts against sampled tokens: verifier/rules.py's Strict and Synthetic in one launch.

Request b has draft slots cu[b] .. cu[b + 1] - 1 and logits rows cu[b] + b .. cu[b + 1] + b: the pending token's, then
one behind each draft. Everything that changes from step to step is read from device tensors. A draft id of -1 is no
token: never accepted, and what follows it is not reached. A request whose first row has a negative position (target
token -1) is padding: its tokens are -1 and its counts 0. Definitions: kernels/reference/rejection.py.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.philox import random_words, words_to_uniform
from kernels.reference.philox import Stream
from kernels.reference.rejection import Verified
from kernels.sizes import next_power_of_2

ACCEPT: tl.constexpr = tl.constexpr(int(Stream.ACCEPT))


@triton.jit
def load_drafts(draft_token_ids_ptr, cu_ptr, request, places):
    """A request's first row, its drafts (-1 behind the last) and their first slot."""
    first = tl.load(cu_ptr + request).to(tl.int64)
    num_slots = tl.load(cu_ptr + request + 1).to(tl.int64) - first
    drafts = tl.load(draft_token_ids_ptr + first + places, mask=places < num_slots, other=-1).to(tl.int64)
    return first + request, drafts, first


@triton.jit
def length_of_prefix(holds, places, PLACES: tl.constexpr):
    """How many of the first places hold before one does not."""
    return tl.min(tl.where(holds, PLACES, places), axis=0).to(tl.int64)


@triton.jit
def accept_uniforms(seeds_ptr, positions_ptr, row, drafts, places):
    """The ACCEPT stream's float64 at each draft's position."""
    positions = tl.load(positions_ptr + row + places, mask=drafts >= 0, other=0)
    words, _, _, _ = random_words(tl.load(seeds_ptr + row), positions, ACCEPT, 0, places * 0)
    return words_to_uniform(words)


@triton.jit
def store_tokens(token_ids_ptr, request, width, drafts, num_accepted, last_token_id, places):
    tokens = tl.where(places < num_accepted, drafts, tl.where(places == num_accepted, last_token_id, -1))
    tl.store(token_ids_ptr + request * width + places, tokens, mask=places < width)


@Kernel
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["num_drafts_ptr", "cu_ptr", "positions_ptr"])
def verify_sampled_kernel(
    token_ids_ptr,  # [num_requests, width] int64
    num_accepted_ptr,  # [num_requests] int64
    num_drafts_ptr,  # [num_requests] int64
    target_token_ids_ptr,  # [num_rows] int64
    draft_token_ids_ptr,  # [num_drafts] int64
    cu_ptr,  # [num_requests + 1] int
    seeds_ptr,  # [num_rows] int64, or None
    positions_ptr,  # [num_rows] int64, or None
    rates_ptr,  # [width - 1] float64, or None: accepted is what the target has drawn
    width,
    PLACES: tl.constexpr,  # >= width
):
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES)
    row, drafts, _ = load_drafts(draft_token_ids_ptr, cu_ptr, request, places)
    num_drafts = length_of_prefix(drafts >= 0, places, PLACES)
    num_accepted = num_drafts * 0
    last_token_id = tl.load(target_token_ids_ptr + row)
    if last_token_id >= 0:
        if rates_ptr is None:
            targets = tl.load(target_token_ids_ptr + row + places, mask=drafts >= 0, other=-1)
            accepted = (drafts >= 0) & (targets == drafts)
        else:
            rates = tl.load(rates_ptr + places, mask=places < width - 1, other=0.0)
            uniforms = accept_uniforms(seeds_ptr, positions_ptr, row, drafts, places)
            accepted = (drafts >= 0) & (uniforms < rates)
        num_accepted = length_of_prefix(accepted, places, PLACES)
        last_token_id = tl.load(target_token_ids_ptr + row + num_accepted)
    else:
        num_drafts = num_drafts * 0
    store_tokens(token_ids_ptr, request, width, drafts, num_accepted, last_token_id, places)
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(num_drafts_ptr + request, num_drafts)


def verify_strict(
    target_token_ids: Tensor,  # [num_rows] int64: sampled at every row; -1 for padding
    draft_token_ids: Tensor,  # [num_drafts] int64
    cu_num_draft_tokens: Tensor,  # [num_requests + 1] int32 or int64
    *,
    max_num_draft_tokens: int,
) -> Verified:
    """A draft token stays iff it is the token the target draws there."""
    return _verify_sampled(
        target_token_ids, draft_token_ids, cu_num_draft_tokens, None, None, None, max_num_draft_tokens
    )


def verify_synthetic(
    target_token_ids: Tensor,  # [num_rows] int64: sampled at every row; -1 for padding
    draft_token_ids: Tensor,  # [num_drafts] int64
    cu_num_draft_tokens: Tensor,  # [num_requests + 1] int32 or int64
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    conditional_rates: Tensor,  # [>= max_num_draft_tokens] float64
    *,
    max_num_draft_tokens: int,
) -> Verified:
    """Draft tokens stay at the rates of their places, whatever they are."""
    assert len(conditional_rates) >= max_num_draft_tokens, "a rate for each place"
    return _verify_sampled(
        target_token_ids,
        draft_token_ids,
        cu_num_draft_tokens,
        seeds,
        positions,
        conditional_rates,
        max_num_draft_tokens,
    )


def _verify_sampled(
    target_token_ids: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    seeds: Tensor | None,
    positions: Tensor | None,
    rates: Tensor | None,
    max_num_draft_tokens: int,
) -> Verified:
    verified, num_requests = empty_result(cu_num_draft_tokens, max_num_draft_tokens)
    width = max_num_draft_tokens + 1
    if num_requests:
        verify_sampled_kernel[(num_requests,)](
            *verified,
            target_token_ids,
            draft_token_ids,
            cu_num_draft_tokens,
            seeds,
            positions,
            rates,
            width,
            PLACES=next_power_of_2(width),
            num_warps=1,
        )
    return verified


def empty_result(cu_num_draft_tokens: Tensor, max_num_draft_tokens: int) -> tuple[Verified, int]:
    num_requests, device = len(cu_num_draft_tokens) - 1, cu_num_draft_tokens.device
    counts = torch.empty(2, num_requests, dtype=torch.int64, device=device)
    token_ids = torch.empty(num_requests, max_num_draft_tokens + 1, dtype=torch.int64, device=device)
    return Verified(token_ids, counts[0], counts[1]), num_requests
