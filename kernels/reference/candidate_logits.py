"""Logits of a place's candidates behind the token before it: what DFlash 2's selector says of each pair."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.cluster_logits import OUTSIDE


def candidate_logits(
    unary: Tensor,  # [num_owners, num_candidates] float32
    candidates: Tensor,  # [num_owners, num_candidates] int64, different ones of an owner
    hidden: Tensor,  # [num_owners, rank], as the next two
    predecessors: Tensor,  # [vocab, rank]
    successors: Tensor,  # [vocab, rank]
    token_ids: Tensor,  # [num_rows] int64: the token before each row's place
) -> Tensor:  # [num_rows, vocab] float32
    """unary[c] + sum over r of predecessors[token, r] * hidden[r] * successors[c, r] of candidates, OUTSIDE of others.

    Rows are owner by owner, equally many of each. Products and sums are float32.
    """
    num_rows, num_each = len(token_ids), len(token_ids) // max(len(unary), 1)
    of_rows = (own.repeat_interleave(num_each, dim=0) for own in (unary, candidates, hidden.float()))
    own_unary, own_candidates, own_hidden = of_rows
    latent = predecessors[token_ids].float() * own_hidden
    scores = own_unary + (latent.unsqueeze(1) * successors[own_candidates].float()).sum(dim=2)
    logits = torch.full((num_rows, len(successors)), OUTSIDE, dtype=torch.float32, device=unary.device)
    return logits.scatter_(1, own_candidates, scores)
