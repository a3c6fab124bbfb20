"""Prompt lookup over rows of tokens: what followed the last few tokens of a row where they occurred before in it.

The longest n-gram of min_n..max_n tokens that ends a row and occurs earlier wins, among its occurrences the most
recent one; the draft goes on into what it has just copied, as in LZ77 (Saxena, 2023; as proposers/lookup finds them).
"""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_match(
    token_ids: Tensor,  # [num_slots, width] int32: row s holds lengths[s] tokens; what lies behind is not looked at
    lengths: Tensor,  # [num_slots] int64
    slots: Tensor,  # [B] int64: the rows that draft; -1: none, so that a batch can be padded
    *,
    min_n: int,
    max_n: int,
    num_tokens: int,
) -> Tensor:
    """[B, num_tokens] int64 drafts; a row of -1 where no n-gram of the row's end occurs earlier. Reads nothing back."""
    known = slots.clamp(min=0)
    text = token_ids[known]  # [B, width]
    length = torch.where(slots >= 0, lengths[known], 0).unsqueeze(1)  # [B, 1]
    # An occurrence is named by the position behind it, which holds the first token of the draft.
    ends = torch.arange(token_ids.shape[1], device=token_ids.device).unsqueeze(0)
    matches = (ends >= 1) & (ends < length)
    best = torch.zeros_like(length)  # n << 32 | end: its maximum is the longest n-gram's right-most occurrence
    for n in range(1, max_n + 1):
        last = text.gather(1, (length - n).clamp(min=0))
        matches = matches & (ends >= n) & (text.gather(1, (ends - n).clamp(min=0).expand_as(text)) == last)
        if n >= min_n:
            found = torch.where(matches, (n << 32) | ends, 0)
            best = torch.maximum(best, found.amax(dim=1, keepdim=True))
    end = best & 0xFFFFFFFF
    # A match so near the end that the draft reaches it is a period.
    places = end + torch.arange(num_tokens, device=token_ids.device) % (length - end).clamp(min=1)
    return torch.where(best > 0, text.gather(1, places).to(torch.int64), -1)
