"""The exact distribution of what a rule commits, summed over every draft, outcome of its tests and recovered token.

Float64 throughout, over toy vocabularies with random distributions that depend on the whole prefix. The arithmetic is
the sampler's own: the measure of {u: accepted} is found by bisection of the rule's test, the count and the residual are
the rule's functions. What each step leaves to the next is the business of tests/test_block_over_steps.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.reference import rejection as ops

RULES = ("probabilistic", "block")
CASES = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (3, 4), (4, 2), (4, 3)]  # vocabulary, draft tokens


@dataclass(frozen=True, kw_only=True)
class Verification:
    """One step over all possible drafts x_1..x_K, N = vocab ** K of them."""

    probabilities: Tensor  # [N] of each draft under q
    kept: Tensor  # [N, K + 1] chance that 0, 1, ... K of its tokens stay
    output: Tensor  # [N, vocab ** (K + 1)] probs of the next K + 1 tokens: kept, recovered or bonus, then target's
    target: Tensor  # [vocab ** (K + 1)] the target's own distribution of them

    def mean_kept(self) -> float:
        kept = (self.kept * torch.arange(self.kept.shape[1])).sum(dim=1)
        return float((self.probabilities * kept).sum())


def random_probs(vocab_size: int, num_tokens: int, generator: torch.Generator) -> list[Tensor]:
    """probs[d]: [vocab ** d, vocab], of token d given the d before it; peaked and flat ones, with ties and zeros."""
    rows = []
    for depth in range(num_tokens):
        shape = (vocab_size**depth, vocab_size)
        weights = (2 * torch.randn(shape, dtype=torch.float64, generator=generator)).exp()
        kind = torch.randint(0, 6, shape, generator=generator)
        weights = torch.where(kind == 0, 0.0, torch.where(kind == 1, 1.0, weights))
        weights[weights.sum(dim=1) == 0] = 1.0
        rows.append(weights / weights.sum(dim=1, keepdim=True))
    return rows


def measure(accepts: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Length of {u in (0, 1): accepted}, which is an interval that begins at 0."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(64):
        middle = (low + high) / 2
        accepted = accepts(middle)
        low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    return low


def enumerate_step(rule: str, p: list[Tensor], q: list[Tensor] | None) -> Verification:
    """p: distributions of K + 1 tokens; q: distributions of the K drafts, None for drafts without one."""
    num_drafts, vocab_size = len(p) - 1, p[0].shape[1]
    drafts = torch.tensor(list(itertools.product(range(vocab_size), repeat=num_drafts)))  # [N, K]
    place = torch.arange(len(drafts))
    prefix_idx = [place // vocab_size ** (num_drafts - depth) for depth in range(num_drafts + 1)]
    p_rows = [probs[index] for probs, index in zip(p, prefix_idx, strict=True)]
    p_draft = torch.stack([p_rows[i][place, drafts[:, i]] for i in range(num_drafts)], dim=1)
    q_rows = q_draft = None
    if q is not None:
        q_rows = [probs[index] for probs, index in zip(q, prefix_idx, strict=False)]
        q_draft = torch.stack([q_rows[i][place, drafts[:, i]] for i in range(num_drafts)], dim=1)
    scale = torch.ones_like(p_draft)
    accepts: Callable[[Tensor], Tensor]
    if rule == "block":
        prefix = ops.prefix_probabilities(p_draft, q_draft)
        masses, scale = [], prefix[:, :-1]
        for i in range(num_drafts):
            if q_rows is None:
                masses.append(ops.residual_mass_one_hot(p_draft[:, i], prefix[:, i]))
            else:
                masses.append(ops.residual_mass(p_rows[i], q_rows[i], prefix[:, i]))
        lengths, masses_tensor = torch.full((len(drafts),), num_drafts), torch.stack(masses, dim=1)
        accepts, count = lambda u: ops.accept_block(prefix, masses_tensor, lengths, u), ops.last_accepted
    else:
        accepts, count = lambda u: ops.accept_probabilistic(p_draft, q_draft, u), ops.count_accepted
    rates = measure(accepts, p_draft.shape)

    outcomes = torch.tensor(list(itertools.product([False, True], repeat=num_drafts)))  # [2 ** K, K]
    weights = torch.where(outcomes, rates.unsqueeze(1), 1 - rates.unsqueeze(1)).prod(dim=2)  # [N, 2 ** K]
    kept = torch.zeros(len(drafts), num_drafts + 1, dtype=torch.float64).index_add_(1, count(outcomes), weights)

    tail = [torch.ones(vocab_size ** (num_drafts + 1), 1, dtype=torch.float64)]  # of the tokens behind each prefix
    for probs in reversed(p):
        tail.insert(0, (probs.unsqueeze(2) * tail[0].view(*probs.shape, -1)).flatten(1))
    output = torch.zeros(len(drafts), vocab_size ** (num_drafts + 1), dtype=torch.float64)
    for i in range(num_drafts + 1):
        if i == num_drafts:
            last = p_rows[i]
        elif q_rows is None:
            last = ops.residual_one_hot(p_rows[i], drafts[:, i])
        else:
            last = ops.residual(p_rows[i], q_rows[i], scale[:, i])
        last = last / last.sum(dim=1, keepdim=True)
        children = prefix_idx[i].unsqueeze(1) * vocab_size + torch.arange(vocab_size)  # [N, vocab]
        probs = kept[:, i, None, None] * last.unsqueeze(2) * tail[i + 1][children]
        output.view(len(drafts), vocab_size**i, -1)[place, prefix_idx[i]] += probs.flatten(1)
    probabilities = torch.ones(1, dtype=torch.float64) if q_draft is None else q_draft.prod(dim=1)
    return Verification(probabilities=probabilities, kept=kept, output=output, target=tail[0][0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), CASES)
def test_a_step_commits_blocks_of_the_targets_distribution(rule: str, vocab_size: int, num_drafts: int) -> None:
    generator = torch.Generator().manual_seed(100 * vocab_size + num_drafts)
    kept = []
    for _ in range(12):
        p = random_probs(vocab_size, num_drafts + 1, generator)
        q = random_probs(vocab_size, num_drafts, generator)
        step = enumerate_step(rule, p, q)
        assert float(step.probabilities.sum()) == pytest.approx(1, abs=1e-13)
        error = ((step.probabilities.unsqueeze(1) * step.output).sum(dim=0) - step.target).abs().max()
        assert float(error) < 1e-12
        kept.append(step.mean_kept())
    assert max(kept) > 0.3, "where nothing is kept there is little to get wrong"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), CASES)
def test_whatever_a_draft_without_a_distribution_says_the_block_has_the_targets_distribution(
    rule: str, vocab_size: int, num_drafts: int
) -> None:
    """Drafts of n-grams, suffix trees and greedy drafters: no average over drafts, each one alone must do."""
    generator = torch.Generator().manual_seed(vocab_size + 10 * num_drafts)
    for _ in range(4):
        step = enumerate_step(rule, random_probs(vocab_size, num_drafts + 1, generator), None)
        assert float((step.output - step.target).abs().max()) < 1e-12


@pytest.mark.parametrize(("vocab_size", "num_drafts"), CASES)
def test_block_keeps_at_least_as_many_drafts_as_the_probabilistic_rule(vocab_size: int, num_drafts: int) -> None:
    generator = torch.Generator().manual_seed(1000 + 10 * vocab_size + num_drafts)
    gains = []
    for _ in range(12):
        p, q = random_probs(vocab_size, num_drafts + 1, generator), random_probs(vocab_size, num_drafts, generator)
        block, probabilistic = (enumerate_step(rule, p, q).mean_kept() for rule in ("block", "probabilistic"))
        assert block >= probabilistic - 1e-12
        gains.append(block - probabilistic)
    assert (max(gains) > 1e-3) == (num_drafts > 1)  # with one draft token the two are one rule


def test_the_papers_example_keeps_eleven_ninths() -> None:
    """Section 2 of arXiv 2403.10444: p = (1/3, 2/3), q = (2/3, 1/3) at every place, two draft tokens."""
    p, q = (torch.tensor(probs, dtype=torch.float64) / 3 for probs in ([[1.0, 2.0]], [[2.0, 1.0]]))
    p_rows, q_rows = [p.expand(2**depth, 2) for depth in range(3)], [q.expand(2**depth, 2) for depth in range(2)]
    assert enumerate_step("probabilistic", p_rows, q_rows).mean_kept() == pytest.approx(10 / 9, abs=1e-14)
    assert enumerate_step("block", p_rows, q_rows).mean_kept() == pytest.approx(11 / 9, abs=1e-14)


@pytest.mark.parametrize(("vocab_size", "num_drafts"), CASES)
def test_a_prefix_probability_is_the_chance_that_block_keeps_that_prefix(vocab_size: int, num_drafts: int) -> None:
    """The paper's lemma, on which both the distribution and the optimality rest: P(kept >= i | x_1..x_i) = p_i."""
    generator = torch.Generator().manual_seed(vocab_size * num_drafts)
    p, q = random_probs(vocab_size, num_drafts + 1, generator), random_probs(vocab_size, num_drafts, generator)
    step = enumerate_step("block", p, q)
    at_least = step.kept.flip(1).cumsum(1).flip(1)  # [N, K + 1]
    place = torch.arange(len(step.kept))
    ratios = torch.ones(len(place), dtype=torch.float64)  # p_i, one draft after another
    for i in range(1, num_drafts + 1):
        token, before = place // vocab_size ** (num_drafts - i), place // vocab_size ** (num_drafts - i + 1)
        odds = p[i - 1].flatten()[token] / q[i - 1][before, token % vocab_size]
        ratios = (ratios * odds).clamp(max=1.0)
        groups = torch.zeros(vocab_size**i, 2, dtype=torch.float64)
        groups[:, 0].index_add_(0, token, step.probabilities)
        groups[:, 1].index_add_(0, token, step.probabilities * at_least[:, i])
        drafted = groups[:, 0] > 0
        expected = torch.zeros(vocab_size**i, dtype=torch.float64)
        expected[token] = ratios
        assert torch.allclose((groups[:, 1] / groups[:, 0])[drafted], expected[drafted], rtol=0, atol=1e-11)


def test_128_improbable_drafts_neither_overflow_nor_underflow_into_nonsense() -> None:
    """Ratios of 1e-9 forty times over underflow; ratios of 1e9 cannot lift what is 0, nor exceed the ceiling of 1."""
    odds = torch.tensor([[1e-9] * 40 + [1e9] * 88, [1e9] * 128, [1e-9] + [1e9] * 127, [0.0] + [1e9] * 127])
    odds = odds.to(torch.float64)
    p, q = torch.where(odds < 1, odds * 0.5, 0.5), torch.where(odds > 1, 0.5 / odds, 0.5)
    prefix = ops.prefix_probabilities(p, q)
    assert prefix[0, 40] == 0.0 or prefix[0, 40] < 1e-300
    assert (prefix[1] == 1.0).all()
    assert prefix[2, :3].tolist() == pytest.approx([1.0, 1e-9, 1.0])
    assert prefix[3, 1:].tolist() == [0.0] * 128
    assert (ops.prefix_probabilities(torch.zeros(1, 3), torch.zeros(1, 3)) == torch.tensor([1.0, 0, 0, 0])).all()
    masses = torch.full((4, 128), 0.5, dtype=torch.float64)
    for u in (2.0**-33, 1 - 2.0**-33):
        accepted = ops.accept_block(prefix, masses, torch.full((4,), 128), torch.full_like(masses, u))
        assert ops.last_accepted(accepted)[1] == 128
        assert not accepted[3, -1]
