"""The distribution of the sampled text, through the whole engine.

`strict` and `none` share the sampler, so neither can catch its bias: the distribution is computed from the model's
logits and compared with thousands of requests. Seeds are fixed, so a p-value is a constant; all must exceed 1e-4.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from runner.engine.launch import Part
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from tests.conftest import Engines, complete

PROMPT = [3, 5, 4, 6]
NUM_REQUESTS = 2500
SMALL = {"vocab_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 64, "eos_token_id": None}
ROOM = {"max_num_seqs": 4096, "max_num_batched_tokens": 16384, "num_gpu_blocks_override": 4200}
MIN_P_VALUE = 1e-4


def next_token_probs(llm: LLM, histories: Sequence[Sequence[int]], temperature: float = 1.0) -> np.ndarray:
    """The model's distribution after each history, [len(histories), vocab], straight from its logits."""
    requests = [
        Request(request_id=str(i), prompt_token_ids=list(history), sampling_params=SamplingParams(), seed=0)
        for i, history in enumerate(histories)
    ]
    blocks = llm.engine.block_manager
    parts = []
    for request in requests:
        assert blocks.grow(request.block_table, request.num_tokens)
        parts.append(Part(request=request, start=0, end=request.num_tokens, num_logits=1))
    logits = llm.engine.target.run(parts)
    for request in requests:
        blocks.release(request.block_table)
    probs: np.ndarray = torch.softmax(logits.double() / temperature, dim=-1).numpy()
    return probs


@cache
def sequence_distribution(llm: LLM, length: int, temperature: float) -> dict[tuple[int, ...], float]:
    """The exact distribution of the first `length` output tokens."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        probs = next_token_probs(llm, [PROMPT + list(prefix) for prefix in distribution], temperature)
        distribution = {
            (*prefix, token): mass * row[token]
            for (prefix, mass), row in zip(distribution.items(), probs, strict=True)
            for token in range(len(row))
        }
    return distribution


def p_value(observed: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square; cells are merged, in order of their mass, until each expects five counts or more."""
    total = sum(observed.values())
    assert observed.keys() <= distribution.keys()
    counts, expected = [0], [0.0]
    for cell, mass in sorted(distribution.items(), key=lambda item: -item[1]):
        if expected[-1] >= 5:
            counts.append(0)
            expected.append(0.0)
        counts[-1] += observed[cell]
        expected[-1] += mass * total
    if expected[-1] < 5:
        last_count, last_expected = counts.pop(), expected.pop()
        counts[-1] += last_count
        expected[-1] += last_expected
    assert len(counts) > 10, "too few cells to show anything"
    return float(stats.chisquare(counts, np.array(expected) * (total / sum(expected))).pvalue)


@cache
def sampled(llm: LLM, length: int, temperature: float) -> list[tuple[int, ...]]:
    """Texts of NUM_REQUESTS seeds; several tests look at those of one engine."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, seed=seed, ignore_eos=True)
        for seed in range(NUM_REQUESTS)
    ]
    requests, _ = complete(llm, [{"prompt_token_ids": PROMPT}] * NUM_REQUESTS, params)
    return [tuple(request.output_token_ids) for request in requests]


METHODS = {
    "none": None,
    "probabilistic": {
        "method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": "probabilistic",
    },
    "probabilistic, coupled drafts": {
        "method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": "probabilistic",
        "draft_sample_method": "coupled",
    },
    "probabilistic, greedy drafts": {
        "method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": "probabilistic",
        "draft_sample_method": "greedy",
    },
    "block": {"method": "draft_model", "num_speculative_tokens": 2, "rejection_sample_method": "block"},
}  # fmt: skip


# Under the strict rule the tokens are plain decoding's, which the lossless suite compares one by one.
@pytest.mark.parametrize("method", METHODS)
def test_four_tokens_have_the_models_joint_distribution(engines: Engines, method: str) -> None:
    """A step of up to three tokens between two others: what one step leaves behind must not bias the next."""
    llm = engines(METHODS[method], architecture=SMALL, weight_scale=4.0, **ROOM)
    distribution = sequence_distribution(
        engines(None, architecture=SMALL, weight_scale=4.0, **ROOM), 4, temperature=1.5
    )
    assert p_value(Counter(sampled(llm, 4, temperature=1.5)), distribution) > MIN_P_VALUE


def test_the_joint_distribution_test_would_see_a_small_bias(engines: Engines) -> None:
    """Its power: the same counts against the distribution of a temperature a third off."""
    llm = engines(None, architecture=SMALL, weight_scale=4.0, **ROOM)
    distribution = sequence_distribution(llm, 4, temperature=2.0)
    assert p_value(Counter(sampled(llm, 4, temperature=1.5)), distribution) < 1e-6


def test_siblings_are_independent(engines: Engines) -> None:
    llm = engines(None, architecture=SMALL, weight_scale=4.0, **ROOM)
    params = [
        SamplingParams(temperature=1.5, max_tokens=1, seed=seed, n=2, ignore_eos=True)
        for seed in range(NUM_REQUESTS // 2)
    ]
    requests, _ = complete(llm, [{"prompt_token_ids": PROMPT}] * len(params), params)
    first = [request.output_token_ids[0] for request in requests]
    pairs = Counter(zip(first[::2], first[1::2], strict=True))
    (probs,) = next_token_probs(llm, [PROMPT], 1.5)
    product = {(a, b): probs[a] * probs[b] for a, b in itertools.product(range(len(probs)), repeat=2)}
    assert p_value(pairs, product) > MIN_P_VALUE


def test_requests_of_neighbouring_seeds_are_independent(engines: Engines) -> None:
    llm = engines(None, architecture=SMALL, weight_scale=4.0, **ROOM)
    tokens = [text[0] for text in sampled(llm, 4, temperature=1.5)]
    pairs = Counter(itertools.pairwise(tokens))
    (probs,) = next_token_probs(llm, [PROMPT], 1.5)
    product = {(a, b): probs[a] * probs[b] for a, b in itertools.product(range(len(probs)), repeat=2)}
    assert p_value(pairs, product) > MIN_P_VALUE


def test_a_vocabulary_of_4096_is_sampled_by_its_distribution(engines: Engines) -> None:
    llm = engines(None, architecture={**SMALL, "vocab_size": 4096, "num_hidden_layers": 1}, weight_scale=2.0, **ROOM)
    (probs,) = next_token_probs(llm, [PROMPT])
    observed = Counter(sampled(llm, 1, temperature=1.0))
    assert len(observed) > 700
    assert p_value(observed, {(token,): float(mass) for token, mass in enumerate(probs)}) > MIN_P_VALUE
