"""Rejection rules as tensor functions: accepted draft tokens, the recovered token's distribution, the step's tokens.

A ragged batch is flat: draft d of request request_idx[d] is the draft_idx[d]-th of its request. p = the target's
distribution, q = the draft's, u = one uniform variate a draft. All decisions compare in float64.
strict: drafter-invariant speculative decoding (arXiv 2408.07978), whose test is plain equality.
probabilistic: Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318).
block: block verification (Sun et al., arXiv 2403.10444, algorithm 2). typical: Medusa (arXiv 2401.10774), lossy.
A draft token id of -1 stands for "no token"; the rules never accept it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference.row_sum import row_sum


class Verified(NamedTuple):
    token_ids: Tensor  # [num_requests, max_num_draft_tokens + 1] int64: accepted, recovered or bonus, then -1
    num_accepted_tokens: Tensor  # [num_requests] int64
    num_draft_tokens: Tensor  # [num_requests] int64: before a request's first -1


def accept_strict(target_token_ids: Tensor, draft_token_ids: Tensor) -> Tensor:
    """[num_drafts] bool: the draft token is the very token the target draws there."""
    return target_token_ids == draft_token_ids


def accept_probabilistic(p_draft: Tensor, q_draft: Tensor | None, uniforms: Tensor) -> Tensor:
    """[num_drafts] bool: u * q(x) < p(x), in float64; q None = one-hot, q(x) = 1."""
    threshold = uniforms if q_draft is None else uniforms * q_draft.to(torch.float64)
    return threshold < p_draft.to(torch.float64)


def accept_typical(p_draft: Tensor, entropies: Tensor, *, posterior_threshold: float, posterior_alpha: float) -> Tensor:
    """[num_drafts] bool: p(x) > min(posterior_threshold, posterior_alpha * exp(-H(p))); p is not kept."""
    bound = (posterior_alpha * entropies.neg().exp()).clamp(max=posterior_threshold)
    return p_draft.to(torch.float64) > bound


def accept_synthetic(conditional_rates: Tensor, uniforms: Tensor) -> Tensor:
    """[num_drafts] bool: accepted with the given rate, whatever the token (a benchmark's tool, not a lossless rule)."""
    return uniforms < conditional_rates


def prefix_probabilities(p_draft: Tensor, q_draft: Tensor | None) -> Tensor:
    """The chance that block verification keeps 0, 1, ... K or more of these very drafts, [num_requests, K + 1] float64.

    p_0 = 1, p_i = min(p_{i-1} * p(x_i) / q(x_i), 1). No logarithms: 1 is the ceiling, and what underflows belongs to
    drafts that are kept with a chance below 1e-300.

    p_draft, q_draft: [num_requests, K]; p 0 where there is no token. q None = one-hot, q(x) = 1.
    """
    q_drafts = [None] * p_draft.shape[1] if q_draft is None else q_draft.unbind(1)
    prefix = [torch.ones_like(p_draft[:, 0], dtype=torch.float64)]
    for p, q in zip(p_draft.unbind(1), q_drafts, strict=True):
        prefix.append(following_chance(prefix[-1], p, q))
    return torch.stack(prefix, dim=1)


def following_chance(chance: Tensor, p_draft: Tensor, q_draft: Tensor | None) -> Tensor:
    """min(chance * p(x) / q(x), 1), 0 where p(x) is; all [num_drafts], the result float64. q None = one-hot."""
    joint = chance * p_draft.to(torch.float64)
    q = torch.ones_like(joint) if q_draft is None else q_draft.to(torch.float64)
    return torch.where(joint < q, joint / q, (joint > 0).to(torch.float64))


def accept_block(
    prefix: Tensor,  # [num_requests, K + 1] float64: prefix_probabilities
    masses: Tensor,  # [num_requests, K] float64: residual_mass at each draft, scaled by the prefix before it
    num_draft_tokens: Tensor,  # [num_requests] int64
    uniforms: Tensor,  # [num_requests, K] float64
) -> Tensor:
    """[num_requests, K] bool: u_i < h_i; the longest prefix that ends with an accepted token is kept, gaps included.

    h_i = S_i / (S_i + 1 - p_i), with S_i = sum(max(p_i * p - q, 0)) over the distributions of the draft that follows:
    they are the ones given x_1..x_i. The last draft has h = p_i. At p_i = 1, h is 1 also where S is 0 (p == q).
    """
    kept = prefix[:, 1:]
    following = torch.nn.functional.pad(masses[:, 1:], (0, 1))
    place = torch.arange(kept.shape[1], device=kept.device)
    last = (num_draft_tokens - 1).unsqueeze(1)
    inside = (uniforms * (following + 1.0 - kept) < following) | (kept >= 1.0)
    return torch.where(place == last, uniforms < kept, inside & (place < last))


def residual(p: Tensor, q: Tensor, scale: Tensor | None = None) -> Tensor:
    """max(scale * p - q, 0), unnormalised, [num_rows, vocab]: what replaces a rejected token is drawn from it.

    scale: [num_rows], the prefix probability under block verification; None = 1.
    Where nothing is left (p == q but for rounding) the difference carries no information, and p itself is returned.
    """
    difference = _excess(p, q, scale)
    return torch.where(difference.amax(dim=-1, keepdim=True) > 0.0, difference, p)


def residual_one_hot(p: Tensor, draft_token_ids: Tensor) -> Tensor:
    """`residual` for q = one-hot at draft_token_ids [num_rows], at any scale: p without that token; -1 removes none."""
    known = draft_token_ids.clamp(min=0).unsqueeze(1)
    remaining = torch.where(draft_token_ids.unsqueeze(1) >= 0, 0.0, p.gather(1, known)).to(p.dtype)
    difference = p.scatter(1, known, remaining)
    return torch.where(difference.amax(dim=-1, keepdim=True) > 0.0, difference, p)


def normalised(probs: Tensor) -> Tensor:
    """Each row of probs divided by its sum, [num_rows, vocab]."""
    return probs / row_sum(probs).to(probs.dtype).unsqueeze(1)


def residual_mass(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """sum(max(scale * p - q, 0)) over the vocabulary, [num_rows] float64."""
    return row_sum(_excess(p, q, scale))


def residual_mass_one_hot(p_draft: Tensor, scale: Tensor) -> Tensor:
    """`residual_mass` for q = one-hot at tokens of target probability p_draft: all of p but that token."""
    return scale.to(torch.float64) * (1.0 - p_draft.to(torch.float64))


def entropy(p: Tensor) -> Tensor:
    """H of each row in nats, [num_rows] float64; 0 * log(0) = 0."""
    return row_sum(torch.special.entr(p))


def count_accepted(accepted: Tensor) -> Tensor:
    """Accepted draft tokens before each request's first rejection; [num_requests, K] bool -> [num_requests] int64."""
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def last_accepted(accepted: Tensor) -> Tensor:
    """Draft tokens up to each request's last accepted one; [num_requests, K] bool -> [num_requests] int64."""
    lengths = torch.arange(1, accepted.shape[1] + 1, device=accepted.device)
    return (accepted * lengths).amax(dim=1)


def assemble_tokens(
    draft_token_ids: Tensor,  # [num_requests, K] int64
    last_token_ids: Tensor,  # [num_requests] int64: recovered or bonus token
    num_accepted_tokens: Tensor,  # [num_requests] int64
) -> Tensor:
    """[num_requests, K + 1] int64: accepted tokens, then the recovered or bonus token, then -1."""
    token_ids = torch.cat((draft_token_ids, draft_token_ids.new_full((len(draft_token_ids), 1), -1)), dim=1)
    places, accepted = torch.arange(token_ids.shape[1], device=token_ids.device), num_accepted_tokens.unsqueeze(1)
    last = torch.where(places == accepted, last_token_ids.unsqueeze(1), -1)
    return torch.where(places < accepted, token_ids, last)


def _excess(p: Tensor, q: Tensor, scale: Tensor | None) -> Tensor:
    scaled = p if scale is None else p * scale.to(p.dtype).unsqueeze(1)
    return (scaled - q).clamp_(min=0.0)
