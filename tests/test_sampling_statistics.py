"""The sampler and the rules draw from the right distributions: chi-square with fixed seeds; a failure is a code change.

Every test asks for a p-value above ALPHA = 1e-4. `test_the_sample_sizes_find_small_biases` states the power: with
200,000 draws over 16 tokens a bias of 1.1 % total variation is found with probability 0.99, with 40,960 draws over 4096
tokens one of 6 %. The negative control shows a real bug found: a residual that reuses the draft's noise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels.reference.philox import Stream, fold_seeds, uniform
from kernels.reference.sampling import gumbel_argmax
from runner.engine import sampling
from runner.engine.request import DraftTokens
from runner.engine.sampling import draft_tokens
from tests.sampling_for_tests import (
    ALPHA,
    assert_follows,
    assert_independent,
    assert_rate,
    coupled_acceptance,
    decode_markov,
    markov_case,
    p_value,
    sampled_rows,
    sequence_index,
)
from verifier import rejection_sampler
from verifier.rejection_sampler import RejectionSampler


def test_the_sample_sizes_find_small_biases() -> None:
    """Power of the chi-square at level ALPHA against a bias of the given total variation, spread over all tokens."""
    for vocab_size, num_draws, total_variation in ((16, 200_000, 0.011), (4096, 40_960, 0.06), (256, 200_000, 0.02)):
        critical = stats.chi2.isf(ALPHA, vocab_size - 1)
        noncentrality = num_draws * 4 * total_variation**2  # half the tokens 1 + 2 TV times too likely, half 1 - 2 TV
        assert stats.ncx2.sf(critical, vocab_size - 1, noncentrality) > 0.99


def test_draws_follow_the_distribution_and_are_independent_across_positions_seeds_streams_and_siblings() -> None:
    """V=16, 200,000 draws of each kind, with neighbouring keys: consecutive seeds, positions and child indices."""
    num_draws = 200_000
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, generator=generator)
    probs = logits.double().softmax(-1)
    rows = logits.expand(num_draws, -1)
    index, one = torch.arange(num_draws), torch.ones(num_draws, dtype=torch.int64)

    def draw(seeds: Tensor, positions: Tensor, stream: Stream = Stream.TARGET) -> Tensor:
        return gumbel_argmax(rows, seeds, positions, stream)

    by_seed = draw(index, 9 * one)
    by_position = draw(9 * one, index)
    for name, tokens in (("by seed", by_seed), ("by position", by_position)):
        assert_follows(tokens, probs, name)
        assert_independent(tokens[:-1:2], tokens[1::2], probs, probs, f"neighbours {name}")
        assert_independent(tokens[: num_draws // 2], tokens[num_draws // 2 :], probs, probs, f"far apart {name}")
    assert_independent(by_seed, draw(index, 10 * one), probs, probs, "position and the next, of many seeds")
    assert_independent(by_seed, draw(index + 2**32, 9 * one), probs, probs, "seeds that differ in the high word")
    for stream in (Stream.DRAFT, Stream.RESIDUAL):
        assert_independent(by_seed, draw(index, 9 * one, stream), probs, probs, f"TARGET and {stream.name}")
    first, second = (draw(fold_seeds(index, child * one), 9 * one) for child in (0, 1))
    assert_follows(first, probs, "children")
    assert_independent(first, second, probs, probs, "siblings")
    assert_independent(first, by_seed, probs, probs, "child and parent")
    uniforms = uniform(index, 9 * one, Stream.ACCEPT)
    sixteenths, even = (uniforms * 16).long(), torch.full((16,), 1 / 16)
    assert_independent(sixteenths, by_seed, even, probs, "acceptance and token")


def worst_case(target: Tensor) -> Tensor:
    return -target


def same(target: Tensor) -> Tensor:
    return target


def peaked(target: Tensor) -> Tensor:
    return target + 6.0 * (torch.arange(len(target)) == target.argmin())


@pytest.mark.parametrize("draft_logits_of", [worst_case, same, peaked])
@pytest.mark.parametrize(
    ("draft_method", "method"),
    [
        ("coupled", "strict"),
        ("probabilistic", "strict"),
        ("probabilistic", "probabilistic"),
        ("coupled", "probabilistic"),
        ("greedy", "probabilistic"),
    ],
)
def test_one_step_yields_the_target_distribution_at_the_expected_acceptance(
    draft_logits_of: Callable[[Tensor], Tensor], draft_method: str, method: str
) -> None:
    """V=16, 200,000 requests with one draft token each: the first token, and the bonus token after accepted ones."""
    num_requests, vocab_size = 200_000, 16
    generator = torch.Generator().manual_seed(1)
    target, bonus = torch.randn(2, vocab_size, generator=generator) * 1.2
    draft = draft_logits_of(target)
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    seeds, start = torch.arange(num_requests), torch.full((num_requests,), 50)
    rows = sampled_rows(seeds, start, vocab_size)
    token_ids, probs = draft_tokens(draft.expand(num_requests, -1), rows, draft_method, need_probs=True)
    output = RejectionSampler(rejection_sample_method=method)(
        torch.stack([target, bonus]).repeat(num_requests, 1),
        DraftTokens(token_ids=token_ids, cu_num_draft_tokens=list(range(num_requests + 1)), probs=probs),
        sampled_rows(seeds.repeat_interleave(2), torch.stack([start, start + 1], dim=1).flatten(), vocab_size),
    )
    accepted = output.num_accepted_tokens == 1
    assert_follows(output.token_ids[:, 0], p, "first token")
    first, second = output.token_ids[accepted].unbind(1)
    first_counts = torch.bincount(first, minlength=vocab_size).double()
    assert_follows(
        first * vocab_size + second, torch.outer(first_counts, bonus.double().softmax(-1)).flatten(), "bonus"
    )
    if method == "strict":
        rate = coupled_acceptance(p, q) if draft_method == "coupled" else float((p * q).sum())
    else:
        rate = float(p[draft.argmax()] if draft_method == "greedy" else torch.minimum(p, q).sum())
    assert_rate(accepted, rate, "acceptance")
    total_variation = float((p - q).abs().sum() / 2)
    if (draft_method, method) == ("coupled", "strict"):
        assert (1 - total_variation) / (1 + total_variation) - 1e-9 <= rate <= 1 - total_variation + 1e-9


def test_one_step_over_4096_tokens_yields_the_target_distribution() -> None:
    """V=4096, 8,192 requests, draft = -target: the sampler, strict with coupled drafts, and probabilistic.

    One in eight of the strict requests draft a token, the rest decode plainly: the text must not know the difference.
    """
    num_requests, vocab_size, slab = 8_192, 4096, 512
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(vocab_size, generator=generator)
    draft = worst_case(target)
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    strict_tokens, strict_accepted, pairs, probabilistic_tokens, probabilistic_accepted = [], [], [], [], []
    for start in range(0, num_requests, slab):
        seeds, position = torch.arange(start, start + slab), torch.full((slab,), 12)
        rows = sampled_rows(seeds, position, vocab_size)
        num_drafting = slab // 8
        drafting = sampled_rows(seeds[:num_drafting], position[:num_drafting], vocab_size)
        token_ids, _ = draft_tokens(draft.expand(num_drafting, -1), drafting, "coupled", need_probs=False)
        row_seeds = torch.cat([seeds[:num_drafting].repeat_interleave(2), seeds[num_drafting:]])
        row_positions = torch.full((slab + num_drafting,), 12)
        row_positions[1 : 2 * num_drafting : 2] += 1
        output = RejectionSampler(rejection_sample_method="strict")(
            target.expand(slab + num_drafting, -1),
            DraftTokens(token_ids=token_ids, cu_num_draft_tokens=[min(b, num_drafting) for b in range(slab + 1)]),
            sampled_rows(row_seeds, row_positions, vocab_size),
        )
        strict_tokens.append(output.token_ids[:, 0])
        strict_accepted.append(output.num_accepted_tokens[:num_drafting])
        pairs.append(output.token_ids[output.num_accepted_tokens == 1])

        token_ids, probs = draft_tokens(draft.expand(slab, -1), rows, "probabilistic", need_probs=True)
        output = RejectionSampler(rejection_sample_method="probabilistic")(
            target.expand(2 * slab, -1),
            DraftTokens(token_ids=token_ids, cu_num_draft_tokens=list(range(slab + 1)), probs=probs),
            sampled_rows(seeds.repeat_interleave(2), torch.tensor([12, 13]).repeat(slab), vocab_size),
        )
        probabilistic_tokens.append(output.token_ids[:, 0])
        probabilistic_accepted.append(output.num_accepted_tokens)
    strict, probabilistic = torch.cat(strict_tokens), torch.cat(probabilistic_tokens)
    assert_follows(strict, p, "strict")
    assert_follows(probabilistic, p, "probabilistic")
    # Neighbouring seeds, and the two rules' tokens at one position, in 16 classes of tokens.
    classes = torch.zeros(16, dtype=torch.float64).index_add(0, torch.arange(vocab_size) % 16, p)
    assert_independent(strict[::2] % 16, strict[1::2] % 16, classes, classes, "neighbouring seeds")
    assert_rate(torch.cat(strict_accepted), coupled_acceptance(p, q), "coupled")
    assert_rate(torch.cat(probabilistic_accepted), float(torch.minimum(p, q).sum()), "probabilistic")
    bonus = torch.cat(pairs)[:, 1]
    assert_follows(bonus % 16, classes, "bonus")


@pytest.mark.parametrize(
    ("method", "draft_method"),
    [
        ("strict", "coupled"),
        ("probabilistic", "probabilistic"),
        ("probabilistic", "coupled"),
        ("probabilistic", "greedy"),
    ],
)
def test_several_steps_jointly_follow_the_target_distribution(method: str, draft_method: str) -> None:
    """60,000 requests of 5 tokens, ragged drafts of 0 to 2: the joint distribution of all 3125 sequences.

    Noise of draft positions beyond a rejection is met again in the next step; only a joint test can see it matter.
    """
    target, draft, distribution = markov_case(5)
    tokens = decode_markov(method, draft_method, target, draft, num_requests=60_000, num_tokens=5)
    assert_follows(sequence_index(tokens), distribution, f"{method} with {draft_method} drafts")


def test_strict_sequences_are_the_same_tokens_whatever_the_drafter() -> None:
    target, draft, _ = markov_case(1)
    sequences = [
        decode_markov("strict", draft_method, target, other, num_requests=3000, num_tokens=6)
        for draft_method in ("coupled", "probabilistic", "greedy")
        for other in (draft, -target)
    ]
    assert all(torch.equal(sequences[0], other) for other in sequences[1:])


def test_a_residual_that_reuses_the_drafts_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same simulation finds the classical mistake without doubt."""

    class BrokenStream:
        TARGET, DRAFT, RESIDUAL = Stream.TARGET, Stream.DRAFT, Stream.DRAFT

    monkeypatch.setattr(rejection_sampler, "verify_chains", lambda *_: None)
    monkeypatch.setattr(sampling, "Stream", BrokenStream)
    target, draft, distribution = markov_case(3)
    tokens = decode_markov("probabilistic", "probabilistic", target, draft, num_requests=20_000, num_tokens=3)
    counts = torch.bincount(sequence_index(tokens), minlength=len(distribution))
    assert p_value(counts, distribution * len(tokens)) < 1e-12


def test_synthetic_acceptance_runs_at_the_configured_rates() -> None:
    num_requests, rates = 50_000, [0.9, 0.5, 0.75]
    seeds = torch.arange(num_requests)
    logits = torch.zeros(1, 8).expand(4 * num_requests, -1)
    output = RejectionSampler(rejection_sample_method="synthetic", synthetic_conditional_rates=rates)(
        logits,
        DraftTokens(
            token_ids=torch.full((3 * num_requests,), 7),
            cu_num_draft_tokens=list(range(0, 3 * num_requests + 1, 3)),
        ),
        sampled_rows(seeds.repeat_interleave(4), torch.arange(5, 9).repeat(num_requests), 8),
    )
    for place, rate in enumerate(rates):
        reached = output.num_accepted_tokens[output.num_accepted_tokens >= place]
        assert_rate(reached > place, rate, f"place {place}")
    last = output.token_ids.gather(1, output.num_accepted_tokens.unsqueeze(1)).squeeze(1)
    assert_follows(last, torch.ones(8), "the target's own tokens")
