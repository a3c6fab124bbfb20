"""Block verification over several steps: what a step has looked at must not be met again by the next one.

The rule decides where to cut by looking at drafts and noise beyond the cut. Keyed by position alone, the next step
would draft and judge with that very noise, now known to have failed: each step is exact, and their text is biased.
Found here by the joint distribution of whole sequences; the rule keys its noise, and the drafts', by draft step too.
"""

from __future__ import annotations

import pytest
import torch

from tests.sampling_for_tests import assert_follows, decode_markov, markov_case, p_value, sequence_index
from verifier.rules import Block

# Vocabulary, tokens of the sequence, drafts after each last token, seed of the distributions.
CASES = [(5, 5, (2, 1, 2, 0, 2), 3), (3, 5, (3, 3, 3), 3), (2, 6, (3, 3), 3), (4, 5, (3, 2, 3, 1), 3)]
NUM_REQUESTS = 40_000


def sequences(case: tuple[int, int, tuple[int, ...], int], draft_method: str) -> tuple[torch.Tensor, torch.Tensor]:
    vocab_size, num_tokens, num_drafts_after, seed = case
    target, draft, distribution = markov_case(num_tokens, vocab_size, seed)
    tokens = decode_markov(
        "block",
        draft_method,
        target,
        draft,
        num_requests=NUM_REQUESTS,
        num_tokens=num_tokens,
        num_drafts_after=num_drafts_after,
    )
    return sequence_index(tokens, vocab_size), distribution


def bias(case: tuple[int, int, tuple[int, ...], int], draft_method: str) -> float:
    index, distribution = sequences(case, draft_method)
    return p_value(torch.bincount(index, minlength=len(distribution)), distribution * len(index))


@pytest.mark.parametrize("draft_method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("case", CASES)
def test_several_steps_of_block_jointly_follow_the_target_distribution(
    case: tuple[int, int, tuple[int, ...], int], draft_method: str
) -> None:
    index, distribution = sequences(case, draft_method)
    assert_follows(index, distribution, f"block with {draft_method} drafts, {case}")


@pytest.mark.parametrize(("case", "draft_method"), [(CASES[0], "probabilistic"), (CASES[1], "greedy")])
def test_noise_keyed_by_position_alone_biases_block_verification(
    case: tuple[int, int, tuple[int, ...], int], draft_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same simulation without the key finds the mistake beyond doubt."""
    monkeypatch.setattr(Block, "keys_by_draft_step", False)
    assert bias(case, draft_method) < 1e-20


def test_coupled_drafts_bias_block_verification() -> None:
    """Why the configuration refuses them: their noise belongs to target tokens of steps to come.

    (Keyed by the draft step they would be sound, and no longer coupled to anything: probabilistic drafts.)
    """
    assert bias(CASES[2], "coupled") < 1e-9


@pytest.mark.parametrize("method", ["strict", "probabilistic", "block", "typical"])
@pytest.mark.parametrize("draft_method", ["probabilistic", "greedy"])
def test_slots_without_a_draft_are_as_if_they_were_not_there(method: str, draft_method: str) -> None:
    """Trailing -1, as device-side drafters leave them: the same tokens as from ragged drafts, under every rule."""
    target, draft, _ = markov_case(1)
    ragged, padded = (
        decode_markov(method, draft_method, target, draft, num_requests=2000, num_tokens=6, pads=pads)
        for pads in (False, True)
    )
    assert torch.equal(ragged, padded)
