"""Proposers that are always right, wrong, or right by half: the same tokens, in the very steps their guesses imply.

A step count that is off by one is either work done twice or a token that the verifier let through unchecked.
"""

from __future__ import annotations

import math

import pytest

from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.metrics import MetricsCollector
from tests.conftest import Engines, complete
from tests.proposers_for_tests import KnownText

PROMPTS = [{"prompt_token_ids": [(i * 13 + j * 5) % 64 for j in range(3 + 4 * i)]} for i in range(6)]
NUM_OUTPUT_TOKENS = (1, 2, 5, 16, 17, 23)
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), max_tokens=count, seed=i, ignore_eos=True)
    for i, count in enumerate(NUM_OUTPUT_TOKENS)
]
K_VALUES = [1, 2, 4, 7, 16]


def run(
    engines: Engines, proposer: str, num_speculative_tokens: int, rule: str = "strict"
) -> tuple[list[Request], MetricsCollector]:
    """The proposer's run over PROMPTS; its tokens have been compared with plain decoding's."""
    plain, _ = complete(engines(), PROMPTS, PARAMS)
    KnownText.continuations = {request.request_id: list(request.output_token_ids) for request in plain}
    config = {
        "method": "custom_class",
        "model": f"tests.proposers_for_tests.{proposer}",
        "num_speculative_tokens": num_speculative_tokens,
        "rejection_sample_method": rule,
    }
    requests, metrics = complete(engines(config), PROMPTS, PARAMS)
    if rule == "strict":
        assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]
    return requests, metrics


def assert_steps(metrics: MetricsCollector, tokens_per_step: int, num_speculative_tokens: int) -> None:
    """The prompt's step yields one token, every other one tokens_per_step until max_tokens cuts the last."""
    by_id = {record.request_id: record for record in metrics.records}
    for index, num_tokens in enumerate(NUM_OUTPUT_TOKENS):
        record = by_id[str(index)]
        num_steps = 1 + math.ceil((num_tokens - 1) / tokens_per_step)
        assert len(record.tokens_per_step) == num_steps
        assert record.tokens_per_step[0] == 1
        assert set(record.tokens_per_step[1:-1]) <= {tokens_per_step}
        # A draft never reaches beyond max_tokens: the step's last token comes from the target.
        said = 0
        for yielded, drafted, accepted in zip(
            record.tokens_per_step, record.num_draft_tokens, record.num_accepted_tokens, strict=True
        ):
            assert drafted == (min(num_speculative_tokens, num_tokens - said - 1) if said else 0)
            assert accepted == yielded - 1
            said += yielded
        assert said == num_tokens
    longest = max(NUM_OUTPUT_TOKENS)
    assert len(metrics.step_points) == 1 + math.ceil((longest - 1) / tokens_per_step)


@pytest.mark.parametrize("num_speculative_tokens", K_VALUES)
def test_an_oracle_needs_one_step_for_k_plus_one_tokens(engines: Engines, num_speculative_tokens: int) -> None:
    _, metrics = run(engines, "OracleProposer", num_speculative_tokens)
    assert_steps(metrics, num_speculative_tokens + 1, num_speculative_tokens)


@pytest.mark.parametrize("num_speculative_tokens", K_VALUES)
def test_an_adversary_gains_nothing_from_right_tokens_behind_a_wrong_one(
    engines: Engines, num_speculative_tokens: int
) -> None:
    _, metrics = run(engines, "AdversarialProposer", num_speculative_tokens)
    assert_steps(metrics, 1, num_speculative_tokens)


@pytest.mark.parametrize("num_speculative_tokens", K_VALUES)
def test_half_right_drafts_yield_their_right_half_and_the_correction(
    engines: Engines, num_speculative_tokens: int
) -> None:
    _, metrics = run(engines, "HalfRightProposer", num_speculative_tokens)
    assert_steps(metrics, num_speculative_tokens // 2 + 1, num_speculative_tokens)


def test_random_guesses_change_no_token_and_are_right_as_often_as_chance_allows(engines: Engines) -> None:
    _, metrics = run(engines, "RandomProposer", 4)
    assert sum(point.num_draft_tokens for point in metrics.step_points) > 150
    # 60 first guesses of 1 in 64: more than 8 right ones have a probability below 1e-5.
    assert metrics.num_accepted_tokens <= 8


def test_under_the_probabilistic_rule_a_wrong_greedy_guess_costs_the_step_and_a_right_one_saves_it(
    engines: Engines,
) -> None:
    for proposer, tokens_per_step in (("OracleProposer", 5), ("AdversarialProposer", 1)):
        _, metrics = run(engines, proposer, 4, rule="probabilistic")
        for record in metrics.records:
            if int(record.request_id) % 2 == 0:  # the greedy ones
                assert set(record.tokens_per_step[1:-1]) <= {tokens_per_step}


def test_the_synthetic_rule_accepts_whatever_the_tokens_are(engines: Engines) -> None:
    plain, _ = complete(engines(), PROMPTS, PARAMS)
    KnownText.continuations = {request.request_id: list(request.output_token_ids) for request in plain}
    config = {
        "method": "custom_class",
        "model": "tests.proposers_for_tests.AdversarialProposer",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.0,
    }
    _, metrics = complete(engines(config), PROMPTS, PARAMS)
    assert_steps(metrics, 3, 4)


def test_a_prompt_in_chunks_takes_its_steps_before_the_first_token(engines: Engines) -> None:
    """90 prompt tokens in chunks of 20 are five steps; 21 tokens at K = 4 are one token and four full drafts."""
    prompt = [{"prompt_token_ids": [(5 * j) % 64 for j in range(90)]}]
    params = [SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)]
    plain, _ = complete(engines(), prompt, params)
    KnownText.continuations = {"0": list(plain[0].output_token_ids)}
    config = {
        "method": "custom_class", "model": "tests.proposers_for_tests.OracleProposer", "num_speculative_tokens": 4,
    }  # fmt: skip
    requests, metrics = complete(engines(config, max_num_seqs=4, max_num_batched_tokens=20), prompt, params)
    assert requests[0].output_token_ids == plain[0].output_token_ids
    assert [point.num_output_tokens for point in metrics.step_points] == [0, 0, 0, 0, 1, 5, 5, 5, 5]
