"""Siblings drawn without replacement: their order, their probs, and that the first is what a chain would have drawn."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.reference.philox import Stream
from proposers.trees.candidates import draw_candidates
from runner.engine.sampling import SamplingRows, draft_tokens, sample_tokens
from tests.no_readback import NoReadback
from tests.sampling_for_tests import assert_follows, sampled_rows

VOCAB_SIZE = 5


def mixed_rows(num_rows: int) -> SamplingRows:
    """Every third row greedy."""
    greedy = [row % 3 == 0 for row in range(num_rows)]
    return SamplingRows(
        vocab_size=VOCAB_SIZE,
        is_greedy=tuple(greedy),
        seeds=torch.arange(num_rows),
        positions=torch.arange(num_rows) % 7,
        random_row_idx=torch.tensor([row for row in range(num_rows) if not greedy[row]]),
    )


@pytest.mark.parametrize("method", ["greedy", "probabilistic", "coupled"])
@pytest.mark.parametrize("draft_step", [0, 3])
def test_the_first_candidate_is_the_draft_of_a_chain(method: str, draft_step: int) -> None:
    logits = torch.randn(40, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows = mixed_rows(40)
    steps = torch.full((40,), draft_step)
    candidates, probs = draw_candidates(logits, rows, method, 3, need_probs=True, draft_step=steps)
    drafted, drafted_probs = draft_tokens(logits, rows, method, need_probs=True, draft_step=steps)
    assert torch.equal(candidates[:, 0], drafted)
    assert (probs is None) == (drafted_probs is None) == (method == "greedy")
    if probs is not None and drafted_probs is not None:
        assert torch.equal(probs[:, 0], drafted_probs)
    assert all(len(set(row)) == 3 for row in candidates.tolist())
    if method == "coupled":
        assert torch.equal(candidates[:, 0], sample_tokens(logits, rows, Stream.TARGET))


def test_candidates_follow_the_distributions_they_come_with() -> None:
    """Ordered pairs of 30000 draws: q(a) q(b) / (1 - q(a))."""
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, float("-inf")])
    rows = sampled_rows(torch.arange(30_000), torch.full((30_000,), 4), VOCAB_SIZE)
    pairs, probs = draw_candidates(logits.expand(30_000, -1), rows, "probabilistic", 2, need_probs=True)
    assert probs is not None
    q = logits.double().softmax(-1)
    expected = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for a, b in itertools.permutations(range(4), 2):
        expected[a, b] = q[a] * q[b] / (1 - q[a])
    assert_follows(pairs[:, 0] * VOCAB_SIZE + pairs[:, 1], expected.flatten(), "pairs")
    for row in range(50):
        a = int(pairs[row, 0])
        given = q.clone()
        given[a] = 0
        assert torch.allclose(probs[row, 1].double(), given / given.sum(), atol=1e-6)


def test_where_a_cut_off_leaves_too_few_tokens_the_rest_have_distributions_of_one_token() -> None:
    logits = torch.full((4, VOCAB_SIZE), float("-inf"))
    logits[:, 2] = 0.0
    candidates, probs = draw_candidates(logits, sampled_rows(torch.arange(4), torch.arange(4), VOCAB_SIZE),
                                       "probabilistic", 3, need_probs=True)  # fmt: skip
    assert probs is not None and (candidates[:, 0] == 2).all()
    assert torch.equal(probs, torch.nn.functional.one_hot(candidates, VOCAB_SIZE).float())


def test_drawing_reads_nothing_back() -> None:
    logits = torch.randn(12, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows = mixed_rows(12)
    with NoReadback():  # type: ignore[no-untyped-call]
        for method in ("greedy", "probabilistic", "coupled"):
            draw_candidates(logits, rows, method, 2, need_probs=True)
