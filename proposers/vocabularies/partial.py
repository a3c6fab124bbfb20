"""Logits of a drafter that knows a part of the target's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Logit of a token that the drafter does not know. Finite, so that a row whose masks allow no other token still has a
# distribution; its exponential is 0 beside any token that is known.
UNKNOWN_TOKEN_LOGIT = -1000.0


@dataclass(frozen=True)
class KnownTokens:
    ids: torch.Tensor  # [num_known] int64, all different: the target's token of each column of the drafter's logits
    vocab_size: int  # of the target

    def over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_known] -> [num_rows, vocab_size]; other tokens have no chance."""
        return logits.new_full((len(logits), self.vocab_size), UNKNOWN_TOKEN_LOGIT).index_copy_(1, self.ids, logits)


def over_target_vocabulary(logits: torch.Tensor, known: KnownTokens | None) -> torch.Tensor:
    """known: of the logits' columns; None: they are the target's vocabulary."""
    return logits if known is None else known.over_target_vocabulary(logits)
