"""Ragged chains of drafts against sampled tokens, compiled: kernels/rejection.py's strict and synthetic rules."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers, pointer
from kernels.cpu.philox import random_words, uniform_of
from kernels.cpu.recording import empty
from kernels.reference.philox import Stream
from kernels.reference.rejection import Verified

Arguments = arguments_of(
    *("token_ids", "num_accepted", "num_drafts"),
    *("target_token_ids", "draft_token_ids", "cu", "seeds", "positions", "rates"),  # seeds 0: by the target's tokens
    *("num_requests", "num_rows", "width"),
)
ACCEPT, NOTHING = np.uint64(int(Stream.ACCEPT)), np.uint64(0)


@cache
def verifying() -> Kernel:
    def verify(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        token_ids, targets = integers(a.token_ids, a.num_requests * a.width), integers(a.target_token_ids, a.num_rows)
        accepted_counts, draft_counts = integers(a.num_accepted, a.num_requests), integers(a.num_drafts, a.num_requests)
        drafts, cu = integers(a.draft_token_ids, a.num_rows), integers(a.cu, a.num_requests + 1)
        seeds, positions = integers(a.seeds, a.num_rows), integers(a.positions, a.num_rows)
        rates = carray(pointer(a.rates), (a.width,), np.float64)
        for request in range(part, a.num_requests, num_parts):
            first, own = cu[request], request * a.width
            row, num_drafts, num_accepted = first + request, 0, 0
            is_here = targets[row] >= 0
            while is_here and num_drafts < cu[request + 1] - first and drafts[first + num_drafts] >= 0:
                num_drafts += 1
            while num_accepted < num_drafts:
                if a.seeds:
                    position = np.uint64(positions[row + num_accepted])
                    words = random_words(NOTHING, position, ACCEPT, NOTHING, np.uint64(seeds[row]))
                    is_accepted = uniform_of(words[0]) < rates[num_accepted]
                else:
                    is_accepted = targets[row + num_accepted] == drafts[first + num_accepted]
                if not is_accepted:
                    break
                token_ids[own + num_accepted] = drafts[first + num_accepted]
                num_accepted += 1
            token_ids[own + num_accepted] = targets[row + num_accepted]
            for place in range(num_accepted + 1, a.width):
                token_ids[own + place] = -1
            accepted_counts[request], draft_counts[request] = num_accepted, num_drafts

    return Kernel(verify, Arguments)


def verify_strict(
    target_token_ids: Tensor,  # [num_rows] int64: sampled at every row; -1 for padding
    draft_token_ids: Tensor,  # [num_drafts] int64
    cu_num_draft_tokens: Tensor,  # [num_requests + 1] int64
    *,
    max_num_draft_tokens: int,
) -> Verified:
    """A draft token stays iff it is the token the target draws there."""
    return _verify(target_token_ids, draft_token_ids, cu_num_draft_tokens, None, None, None, max_num_draft_tokens)


def verify_synthetic(
    target_token_ids: Tensor,  # [num_rows] int64: sampled at every row; -1 for padding
    draft_token_ids: Tensor,  # [num_drafts] int64
    cu_num_draft_tokens: Tensor,  # [num_requests + 1] int64
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    conditional_rates: Tensor,  # [>= max_num_draft_tokens] float64
    *,
    max_num_draft_tokens: int,
) -> Verified:
    """Draft tokens stay at the rates of their places, whatever they are."""
    assert len(conditional_rates) >= max_num_draft_tokens, "a rate for each place"
    return _verify(
        *(target_token_ids, draft_token_ids, cu_num_draft_tokens, seeds, positions, conditional_rates),
        max_num_draft_tokens,
    )


def _verify(
    target_token_ids: Tensor,
    draft_token_ids: Tensor,
    cu: Tensor,
    seeds: Tensor | None,
    positions: Tensor | None,
    rates: Tensor | None,
    max_num_draft_tokens: int,
) -> Verified:
    num_requests, width = len(cu) - 1, max_num_draft_tokens + 1
    values = (target_token_ids, draft_token_ids, cu, seeds, positions, rates)
    assert all(value is None or value.is_contiguous() for value in values)
    token_ids, counts = empty(num_requests, width, dtype=torch.int64), empty(2, num_requests, dtype=torch.int64)
    verified = Verified(token_ids, counts[0], counts[1])
    verifying()(
        *(result.data_ptr() for result in verified),
        *(0 if value is None else value.data_ptr() for value in values),
        *(num_requests, len(target_token_ids), width),
    )
    return verified
