"""Greedy and sampled requests with drafts of different lengths in one batch, under every rule.

Bug told here: a draft step whose requests were all greedy left no distribution behind, so the distributions of a mixed
batch slipped against their drafts, and a sampled request was judged by another one's.
"""

from __future__ import annotations

import itertools

import pytest

from runner.engine.sampling_params import SamplingParams
from tests.conftest import Engines, complete

PROMPTS = [{"prompt_token_ids": [3 + (7 * index + 5 * place) % 60 for place in range(6 + index)]} for index in range(6)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=5, seed=1, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, max_tokens=30, seed=2, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=11, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True),
]


@pytest.mark.parametrize(
    ("rule", "draft_sample_method"),
    [
        *itertools.product(["strict", "probabilistic", "typical"], ["greedy", "probabilistic", "coupled"]),
        ("block", "greedy"),
        ("block", "probabilistic"),
    ],
)
def test_a_request_gets_the_tokens_it_gets_alone(engines: Engines, rule: str, draft_sample_method: str) -> None:
    """All noise is keyed by seed and position, so under every rule a neighbour changes nothing."""
    llm = engines(
        {
            "method": "draft_model",
            "num_speculative_tokens": 4,
            "rejection_sample_method": rule,
            "draft_sample_method": draft_sample_method,
        }
    )
    together, metrics = complete(llm, PROMPTS, PARAMS)
    assert metrics.num_accepted_tokens > 0
    for prompt, params, request in zip(PROMPTS, PARAMS, together, strict=True):
        # The seed of a request without one depends on its index, which is another one when it is alone.
        (alone,), _ = complete(llm, [prompt], [params])
        assert request.output_token_ids == alone.output_token_ids


@pytest.mark.parametrize("rule", ["probabilistic", "block", "typical"])
def test_greedy_requests_get_plain_decodings_tokens_beside_sampled_ones(engines: Engines, rule: str) -> None:
    method = {"method": "draft_model", "num_speculative_tokens": 4, "rejection_sample_method": rule}
    mixed, _ = complete(engines(method), PROMPTS, PARAMS)
    plain, _ = complete(engines(None), PROMPTS, PARAMS)
    for ours, theirs in zip(mixed, plain, strict=True):
        if ours.sampling_params.is_greedy:
            assert ours.output_token_ids == theirs.output_token_ids
