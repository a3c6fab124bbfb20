"""A slot of -1 is no draft: every rule decides a padded batch as it decides the same batch without the padding."""

from __future__ import annotations

import pytest
import torch

from proposers.base import Proposer, check_drafts
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens
from runner.engine.sampling import SamplingRows
from runner.engine.schedule import Schedule
from tests.decoding_steps import schedule_of
from tests.no_readback import NoReadback
from tests.test_ngram import make_proposer, make_request
from tests.test_rejection_rules import flat_drafts, random_batch, verify_rows
from verifier.rejection_sampler import REJECTION_SAMPLE_METHODS, RejectionSampler

VOCAB_SIZE = 11
RATES = [0.9, 0.8, 0.7, 0.6]


def sampler_of(method: str) -> RejectionSampler:
    rates = RATES if method == "synthetic" else None
    return RejectionSampler(rejection_sample_method=method, synthetic_conditional_rates=rates)


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("method", REJECTION_SAMPLE_METHODS)
def test_padding_changes_no_decision(method: str, has_probs: bool) -> None:
    """Logits of padding rows are noise, and their draft distributions too: nobody may look at them."""
    requests, drafts, logits, probs = random_batch(60, VOCAB_SIZE, seed=9)
    most = max(map(len, drafts))
    sampler, generator = sampler_of(method), torch.Generator().manual_seed(1)
    expected = sampler(
        logits, flat_drafts(drafts, probs if has_probs else None), verify_rows(requests, drafts, VOCAB_SIZE)
    )

    padded = [draft + [-1] * (most - len(draft)) for draft in drafts]
    padded_logits, padded_probs = [], []
    row = 0
    for place, draft in enumerate(drafts):
        noise = torch.randn(most - len(draft), VOCAB_SIZE, generator=generator) * 4
        padded_logits += [logits[row + place : row + place + len(draft) + 1], noise]
        padded_probs += [probs[row : row + len(draft)], noise.softmax(-1)]
        row += len(draft)
    flat = flat_drafts(padded, torch.cat(padded_probs) if has_probs else None)
    flat = DraftTokens(
        token_ids=flat.token_ids, cu_num_draft_tokens=flat.cu_num_draft_tokens, probs=flat.probs, is_padded=True
    )
    rows: SamplingRows = verify_rows(requests, padded, VOCAB_SIZE)
    with NoReadback():  # type: ignore[no-untyped-call]
        output = sampler(torch.cat(padded_logits), flat, rows)
    assert output.num_draft_tokens is not None
    assert output.num_draft_tokens.tolist() == [len(draft) for draft in drafts]
    assert torch.equal(output.num_accepted_tokens, expected.num_accepted_tokens)
    assert torch.equal(output.token_ids[:, : expected.token_ids.shape[1]], expected.token_ids)
    assert output.num_accepted_tokens.max() >= 2 and (output.num_draft_tokens == 0).any()


def test_a_batch_without_padding_says_nothing_of_it() -> None:
    requests, drafts, logits, _ = random_batch(4, VOCAB_SIZE, seed=9)
    output = sampler_of("strict")(logits, flat_drafts(drafts), verify_rows(requests, drafts, VOCAB_SIZE))
    assert output.num_draft_tokens is None


def checked(token_ids: list[int], *, is_padded: bool, slots: tuple[int, int] = (3, 2)) -> None:
    """check_drafts of two requests with these slots."""
    proposer: Proposer = make_proposer()
    schedule: Schedule = schedule_of(make_request([1], "a"), make_request([2], "b"))
    drafts = DraftTokens(
        token_ids=torch.tensor(token_ids), cu_num_draft_tokens=[0, slots[0], sum(slots)], is_padded=is_padded
    )
    check_drafts(proposer, schedule, drafts)


def test_padding_behind_a_requests_drafts_is_allowed_where_it_is_announced() -> None:
    for token_ids in ([5, -1, -1, 6, 7], [-1, -1, -1, 6, -1], [5, 6, 7, -1, -1], [5, 6, 7, 8, 9]):
        checked(token_ids, is_padded=True)


@pytest.mark.parametrize(
    ("token_ids", "is_padded", "rule"),
    [
        ([5, -1, -1, 6, 7], False, r"draft tokens in \[0, 99\]"),
        ([5, -2, -2, 6, 7], True, r"draft tokens in \[0, 99\]"),
        ([5, -1, 6, 7, 8], True, "no slot before a draft"),
        ([5, 6, 7, -1, 8], True, "no slot before a draft"),
    ],
)
def test_padding_that_is_not_announced_or_has_drafts_behind_it_is_refused(
    token_ids: list[int], is_padded: bool, rule: str
) -> None:
    with pytest.raises(UserError, match=rule):
        checked(token_ids, is_padded=is_padded)
