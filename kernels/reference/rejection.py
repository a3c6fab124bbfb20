"""Rejection rules as tensor functions: which draft tokens stay, the law of the recovered token, the step's tokens.

A ragged batch is flat: draft d of request request_idx[d] is the draft_idx[d]-th of its request. p = target law,
q = draft law. Rules: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) for the probabilistic one;
drafter-invariant speculative decoding (arXiv 2408.07978) for the strict one, whose test is plain equality.
A draft token id of -1 stands for "no token" and is never accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_strict(target_token_ids: Tensor, draft_token_ids: Tensor) -> Tensor:
    """[num_drafts] bool: the draft token is the very token the target draws there."""
    return target_token_ids == draft_token_ids


def accept_probabilistic(p_draft: Tensor, q_draft: Tensor | None, uniforms: Tensor) -> Tensor:
    """[num_drafts] bool: u * q(x) < p(x), in float64; q None = one-hot, q(x) = 1."""
    threshold = uniforms if q_draft is None else uniforms * q_draft.to(torch.float64)
    return threshold < p_draft.to(torch.float64)


def accept_synthetic(conditional_rates: Tensor, uniforms: Tensor) -> Tensor:
    """[num_drafts] bool: accepted with the given rate, whatever the token (a benchmark's tool, not a lossless rule)."""
    return uniforms < conditional_rates


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), unnormalised, [num_rows, vocab]: the law of the token that replaces a rejected one.

    Where p <= q everywhere (p == q but for rounding) the difference carries no information, and p itself is returned.
    """
    difference = (p - q).clamp_(min=0.0)
    return torch.where(difference.sum(dim=-1, keepdim=True) > 0.0, difference, p)


def residual_one_hot(p: Tensor, draft_token_ids: Tensor) -> Tensor:
    """`residual` for q = one-hot at draft_token_ids [num_rows]: p without that token; -1 removes nothing."""
    known = draft_token_ids.clamp(min=0).unsqueeze(1)
    remaining = torch.where(draft_token_ids.unsqueeze(1) >= 0, 0.0, p.gather(1, known)).to(p.dtype)
    difference = p.scatter(1, known, remaining)
    return torch.where(difference.amax(dim=-1, keepdim=True) > 0.0, difference, p)


def count_accepted(
    accepted: Tensor, request_idx: Tensor, draft_idx: Tensor, *, num_requests: int, max_num_draft_tokens: int
) -> Tensor:
    """Accepted draft tokens before each request's first rejection, [num_requests] int64."""
    padded = torch.zeros(num_requests, max_num_draft_tokens, dtype=torch.int64, device=accepted.device)
    padded[request_idx, draft_idx] = accepted.to(torch.int64)
    return padded.cumprod(dim=1).sum(dim=1)


def assemble_tokens(
    draft_token_ids: Tensor,  # [num_drafts] int64
    last_token_ids: Tensor,  # [num_requests] int64: recovered or bonus token
    num_accepted_tokens: Tensor,  # [num_requests] int64
    request_idx: Tensor,  # [num_drafts] int64
    draft_idx: Tensor,  # [num_drafts] int64
    *,
    max_num_draft_tokens: int,
) -> Tensor:
    """[num_requests, max_num_draft_tokens + 1] int64: accepted tokens, then the recovered or bonus token, then -1."""
    shape = (last_token_ids.shape[0], max_num_draft_tokens + 1)
    token_ids = torch.full(shape, -1, dtype=torch.int64, device=last_token_ids.device)
    is_accepted = draft_idx < num_accepted_tokens[request_idx]
    token_ids[request_idx, draft_idx] = torch.where(is_accepted, draft_token_ids, -1)
    return token_ids.scatter_(1, num_accepted_tokens.unsqueeze(1), last_token_ids.unsqueeze(1))
