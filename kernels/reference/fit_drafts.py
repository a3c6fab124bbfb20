"""The rows that verify a step's drafts, where the host does not know how many of them a request may still use."""

from __future__ import annotations

import torch
from torch import Tensor


def fit_drafts(
    draft_token_ids: Tensor,  # [num_requests, num_drafts] int64; -1: no draft
    last_token_ids: Tensor,  # [num_requests] int64: the last committed token
    lengths: Tensor,  # [num_requests] int64: committed tokens
    limits: Tensor,  # [num_requests] int64: committed tokens at most
) -> tuple[Tensor, Tensor]:
    """(drafts [num_requests, num_drafts], rows [num_requests, num_drafts + 1]), both int64.

    A draft that could not be committed with a token behind it becomes -1, no draft. A row holds what the target reads
    there: the last committed token, then the drafts; where there is none, some token whose result nobody keeps.
    """
    places = torch.arange(draft_token_ids.shape[1], device=lengths.device)
    fits = places < (limits - lengths - 1).unsqueeze(1)
    drafts = torch.where(fits, draft_token_ids, -1)
    return drafts, torch.cat((last_token_ids.unsqueeze(1), drafts.clamp(min=0)), dim=1)
