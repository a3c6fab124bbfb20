"""Logits of the tokens of some clusters of a vocabulary, for each row others."""

from __future__ import annotations

import torch
from torch import Tensor

# Of other tokens. No logit is so low; and it is a number, so that something can be drawn where a grammar allows only
# these. Its power of two is an int32 also where a temperature of 1e-5 divides it.
OUTSIDE = -1e4


def cluster_logits(
    states: Tensor,  # [num_rows, hidden]
    table: Tensor,  # [num_clusters, cluster_size, hidden]: rows of a projection to the vocabulary
    token_ids: Tensor,  # [num_clusters, cluster_size] int64: the token of each, every one once
    chosen: Tensor,  # [num_rows, num_chosen] int64: clusters, different ones of a row
) -> Tensor:  # [num_rows, num_clusters * cluster_size] float32
    own = torch.einsum("rh,rcth->rct", states.float(), table[chosen].float())
    logits = torch.full((len(states), token_ids.numel()), OUTSIDE, dtype=torch.float32, device=states.device)
    return logits.scatter_(1, token_ids[chosen].flatten(1), own.flatten(1))
