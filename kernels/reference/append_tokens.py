"""Puts the tokens that verification committed behind those of their requests: rows of tokens, and how long they are."""

from __future__ import annotations

import torch
from torch import Tensor


def append_tokens(
    token_ids: Tensor,  # [num_slots, width] int32: row s holds lengths[s] tokens; the last row is nobody's
    lengths: Tensor,  # [num_slots] int64
    slots: Tensor,  # [B] int64: the rows that get longer; -1: nobody's
    new_token_ids: Tensor,  # [B, number] int64: committed tokens, then -1
) -> None:
    """What does not fit into a row overwrites its last column."""
    slots = torch.where(slots < 0, len(lengths) - 1, slots)
    before = lengths[slots]
    places = before.unsqueeze(1) + torch.arange(new_token_ids.shape[1], device=slots.device)
    places.clamp_(max=token_ids.shape[1] - 1)
    # What lies behind the new tokens lies behind the new length too, where nobody looks.
    token_ids.index_put_((slots.unsqueeze(1), places), new_token_ids.to(torch.int32))
    lengths.index_copy_(0, slots, before + (new_token_ids >= 0).sum(dim=1))
