"""Advances the requests' state on the device by the tokens that a step has verified; the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def follow_verified(
    lengths: Tensor,  # [num_requests] int64: committed tokens; 0: the request is absent
    last_token_ids: Tensor,  # [num_requests, 2] int64: the last two committed tokens
    token_ids: Tensor,  # [num_requests, width] int64: accepted, recovered or bonus, then -1
    num_accepted: Tensor,  # [num_requests] int64
    num_draft_tokens: Tensor,  # [num_requests] int64
    said: Tensor | None = None,  # [num_requests, vocab] int32: how often each token was said; None: nobody counts
) -> Tensor:  # [num_requests, width + 2] int64: token_ids, num_accepted and num_draft_tokens, packed for the host
    """Writes lengths, last_token_ids and said in place; absent requests stay as they are."""
    is_here = lengths > 0
    if said is not None:
        is_new = (token_ids >= 0) & is_here.unsqueeze(1)
        said.scatter_add_(1, token_ids.clamp(min=0), is_new.to(torch.int32))
    before = torch.cat((last_token_ids[:, 1:], token_ids), dim=1)  # the token in front of each of the step's
    places = num_accepted.clamp(min=0).unsqueeze(1)
    gained = torch.cat((before.gather(1, places), token_ids.gather(1, places)), dim=1)
    last_token_ids.copy_(torch.where(is_here.unsqueeze(1), gained, last_token_ids))
    lengths.add_(torch.where(is_here, num_accepted + 1, 0))
    return torch.cat((token_ids, num_accepted.unsqueeze(1), num_draft_tokens.unsqueeze(1)), dim=1)
