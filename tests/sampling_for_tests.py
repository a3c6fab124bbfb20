"""Statistics of samples, and speculative decoding of Markov chains by the real sampler, tens of thousands at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy import stats
from torch import Tensor

from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling import SamplingRows, draft_tokens, process_logits
from verifier.rejection_sampler import RejectionSampler

ALPHA = 1e-4


def sampled_rows(seeds: Tensor, positions: Tensor, vocab_size: int) -> SamplingRows:
    """Rows at temperature 1 without processors, for tens of thousands of requests at once."""
    return SamplingRows(
        vocab_size=vocab_size,
        is_greedy=(False,) * len(seeds),
        seeds=seeds,
        positions=positions,
        random_row_idx=None,
    )


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Chi-square goodness of fit; cells with less than 5 expected draws are merged into one."""
    counts, expected = counts.flatten().double(), expected.flatten().double()
    assert abs(float(counts.sum() - expected.sum())) < 1e-6 * float(counts.sum()), (
        "counts and expected must have equal mass"
    )
    assert not counts[expected == 0].any(), "a token of probability zero was drawn"
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum().view(1)])
    expected = torch.cat([expected[~small], expected[small].sum().view(1)])
    used = expected > 0
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    return float(stats.chi2.sf(statistic, int(used.sum()) - 1))


def assert_follows(token_ids: Tensor, distribution: Tensor, what: str) -> None:
    counts = torch.bincount(token_ids, minlength=len(distribution))
    value = p_value(counts, distribution.double() / distribution.double().sum() * len(token_ids))
    assert value > ALPHA, (what, value)


def assert_independent(a: Tensor, b: Tensor, probs_a: Tensor, probs_b: Tensor, what: str) -> None:
    """The pairs follow the product distribution."""
    assert_follows(a * len(probs_b) + b, torch.outer(probs_a.double(), probs_b.double()).flatten(), what)


def assert_rate(observed: Tensor, rate: float, what: str) -> None:
    """Within 4.5 standard errors, two-sided p = 7e-6."""
    standard_error = (max(rate * (1 - rate), 1e-12) / observed.numel()) ** 0.5
    assert abs(float(observed.double().mean()) - rate) < 4.5 * standard_error + 1e-6, (what, rate)


def coupled_acceptance(p: Tensor, q: Tensor) -> float:
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): the chance that shared Gumbel noise gives p and q one argmax."""
    ratios = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return float((1.0 / ratios.sum(dim=1)).sum())


def decode_markov(
    method: str,
    draft_method: str,
    target: Tensor,
    draft: Tensor,
    *,
    num_requests: int,
    num_tokens: int,
    num_drafts_after: Sequence[int] = (2, 1, 2, 0, 2),
    pads: bool = False,
) -> Tensor:
    """Speculative decoding of a Markov chain over several steps, [num_requests, num_tokens].

    target, draft: [vocab, vocab] logits of the next token given the last. A step drafts num_drafts_after[last token]
    tokens, so batches are ragged and some requests draft nothing; with pads it fills up with -1 instead.
    """
    vocab_size, num_prompt, widest = len(target), 1, max(num_drafts_after)
    sampler = RejectionSampler(rejection_sample_method=method)
    seeds = torch.arange(num_requests)
    tokens = torch.zeros(num_requests, num_prompt + num_tokens + widest + 1, dtype=torch.int64)
    lengths = torch.full((num_requests,), num_prompt)
    while int(lengths.min()) < num_prompt + num_tokens:
        active = (lengths < num_prompt + num_tokens).nonzero().squeeze(1)
        last = tokens[active, lengths[active] - 1]
        num_drafts = torch.tensor(num_drafts_after)[last]
        draft_step = lengths[active] if sampler.rule.keys_by_draft_step else 0
        context, drafted, draft_probs = [last], [], []
        for step in range(widest):
            rows = sampled_rows(seeds[active], lengths[active] + step, vocab_size)
            processed = process_logits(draft[context[-1]], rows)
            token_ids, probs = draft_tokens(processed, rows, draft_method, need_probs=True, draft_step=draft_step)
            context.append(token_ids)
            drafted.append(torch.where(step < num_drafts, token_ids, -1))
            draft_probs.append(probs if probs is not None else torch.zeros(0))
        num_slots = torch.full_like(num_drafts, widest) if pads else num_drafts
        is_draft = torch.arange(widest) < num_slots.unsqueeze(1)  # [active, widest]
        is_row = torch.arange(widest + 1) <= num_slots.unsqueeze(1)  # [active, widest + 1]
        positions = lengths[active].unsqueeze(1) + torch.arange(widest + 1)
        output: VerifyOutput = sampler(
            target[torch.stack(context, dim=1)[is_row]],
            DraftTokens(
                token_ids=torch.stack(drafted, dim=1)[is_draft],
                cu_num_draft_tokens=[0, *num_slots.cumsum(0).tolist()],
                probs=None if draft_method == "greedy" else torch.stack(draft_probs, dim=1)[is_draft],
            ),
            sampled_rows(seeds[active].unsqueeze(1).expand(-1, widest + 1)[is_row], positions[is_row], vocab_size),
        )
        tokens[active.unsqueeze(1), positions] = output.token_ids
        lengths[active] += output.num_accepted_tokens + 1
    return tokens[:, num_prompt : num_prompt + num_tokens]


def markov_case(num_tokens: int, vocab_size: int = 5, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Target and draft logits of each token after each, and the exact distribution of all sequences after token 0."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(2, vocab_size, vocab_size, generator=generator) * 1.2
    p = target.double().softmax(-1)
    distribution = p[0]
    for _ in range(num_tokens - 1):  # the last token of a sequence is its index modulo vocab_size
        distribution = (distribution.unsqueeze(1) * p.repeat(len(distribution) // vocab_size, 1)).flatten()
    return target, draft, distribution


def sequence_index(tokens: Tensor, vocab_size: int = 5) -> Tensor:
    return (tokens * vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1)).sum(dim=1)
