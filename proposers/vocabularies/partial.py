"""Logits of a drafter that knows a part of the target's tokens, as logits over all of them."""

from __future__ import annotations

import torch

# Logit of a token that the drafter does not know. Finite, so that a row whose masks allow no other token still has a
# distribution; its exponential is 0 beside any token that is known.
UNKNOWN_TOKEN_LOGIT = -1000.0


def over_target_vocabulary(logits: torch.Tensor, target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[num_rows, num_known] -> [num_rows, vocab_size]; tokens beside target_ids [num_known] have no chance."""
    return logits.new_full((len(logits), vocab_size), UNKNOWN_TOKEN_LOGIT).index_copy_(1, target_ids, logits)
