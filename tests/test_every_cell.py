"""Every method under every lossless rule and under every sampler, through the whole engine.

Where the rule promises plain decoding's tokens they are compared; where it promises the distribution, many requests are
drawn and the joint distribution of their first tokens is compared with the exact one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats

from kernels.cpu.panels import Panels, pack, unpack
from proposers import available_methods
from runner.engine.launch import Part
from runner.engine.request import Request
from runner.engine.sampling import SamplingRows, process_logits
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from tests.conftest import Engines, complete
from tests.test_losslessness import ONE_OF_A_KIND, method_config, tell_test_proposers

METHODS = [method for method in available_methods() if method != "none"]
RULES = ("strict", "probabilistic", "block")
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    "temperature": {"temperature": 1.0},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.02},
    "penalties, bias": {"temperature": 1.2, "presence_penalty": 0.7, "logit_bias": {1: 1.5}},
}
VOCAB_SIZE, NUM_TOKENS = 6, 3
SMALL = {
    "architecture": {"vocab_size": VOCAB_SIZE, "eos_token_id": 5},
    "max_num_seqs": 512,  # few large steps
    "max_num_batched_tokens": 6000,
    "num_gpu_blocks_override": 1025,
}
PROMPT = {"prompt_token_ids": [0, 1, 2, 3, 0, 1, 2, 4, 0, 1]}
NUM_REQUESTS = 1000
NUM_COMPARED = 24  # tokens of a text where it is plain decoding's own; a block of the cache holds 16
ALPHA = 1e-4  # of each of the tests, their seeds being fixed
EXACT_DISTRIBUTIONS: dict[str, torch.Tensor] = {}  # by weights and parameters


def engine(engines: Engines, config: dict[str, Any] | None) -> LLM:
    """Of a draft model that is often wrong: it takes some tokens for others."""
    llm = engines(config, **SMALL)
    runner = getattr(getattr(llm.engine.proposer, "drafter", llm.engine.proposer), "runner", None)
    if hasattr(runner, "model") and not hasattr(runner, "is_confused"):
        model = runner.model
        head = unpack(model.lm_head)[[1, 0, 2, 4, 3, 5]]
        model.lm_head = pack(head) if isinstance(model.lm_head, Panels) else head
        runner.is_confused = True
    return llm


def sampling_params(sampler: str, num_requests: int, num_tokens: int = NUM_TOKENS + 1) -> SamplingParams:
    """By default for the distribution of the first NUM_TOKENS tokens: room for two drafts behind the first one."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=5, n=num_requests, **SAMPLERS[sampler])


def exact_distribution(llm: LLM, params: SamplingParams) -> torch.Tensor:
    """Probability of every sequence of NUM_TOKENS tokens after PROMPT, [VOCAB_SIZE ** NUM_TOKENS] float64.

    Computed once for all engines whose targets hold the same weights: the distribution is the target's, whatever
    drafts.
    """
    forbidden = llm.engine.tokenizer.spell_bad_words(params.bad_words)
    digest = hashlib.sha256(repr((dataclasses.replace(params, n=1, max_tokens=1), forbidden)).encode())
    model = llm.engine.target.model
    for weight in (model.embed_tokens, *(weight for layer in model.layers for weight in layer.product_weights)):
        digest.update(unpack(weight).numpy().tobytes())
    if (key := digest.hexdigest()) not in EXACT_DISTRIBUTIONS:
        EXACT_DISTRIBUTIONS[key] = compute_distribution(llm, params, forbidden)
    return EXACT_DISTRIBUTIONS[key]


def compute_distribution(llm: LLM, params: SamplingParams, forbidden: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    probability = {(): torch.tensor(1.0, dtype=torch.float64)}
    for length in range(NUM_TOKENS):
        longer = {}
        for prefix in itertools.product(range(VOCAB_SIZE), repeat=length):
            request = Request(
                request_id="distribution",
                prompt_token_ids=PROMPT["prompt_token_ids"],
                output_token_ids=list(prefix),
                sampling_params=params,
                bad_words_token_ids=forbidden,
                seed=0,
                block_table=[1],
            )
            logits = llm.engine.target.run([Part(request=request, start=0, end=request.num_tokens, num_logits=1)])
            rows = SamplingRows.build(
                [request], [0], [0], None, vocab_size=VOCAB_SIZE, eos_token_ids=(5,), device=logits.device
            )
            distribution = process_logits(logits, rows)[0].double().softmax(0)
            longer |= {(*prefix, token): probability[prefix] * distribution[token] for token in range(VOCAB_SIZE)}
        probability = longer
    return torch.stack([probability[s] for s in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS)])


def p_value(requests: list[Request], distribution: torch.Tensor) -> float:
    """Of Pearson's chi-square over the first NUM_TOKENS tokens; sequences expected less than five times are pooled."""
    weights = [VOCAB_SIZE**place for place in reversed(range(NUM_TOKENS))]
    said = [request.output_token_ids[:NUM_TOKENS] for request in requests]
    index = [sum(t * w for t, w in zip(token_ids, weights, strict=True)) for token_ids in said]
    counts, expected = torch.bincount(torch.tensor(index), minlength=len(distribution)), distribution * len(requests)
    assert not counts[distribution == 0].any(), "a token outside the distribution was said"
    rare = expected < 5
    observed = [*counts[~rare].tolist(), int(counts[rare].sum())]
    hoped = [*expected[~rare].tolist(), float(expected[rare].sum())]
    if hoped[-1] == 0:
        observed.pop(), hoped.pop()
    scale = sum(observed) / sum(hoped)
    return float(stats.chisquare(observed, [value * scale for value in hoped]).pvalue)


@cache
def plain_texts(engines: Engines, sampler: str) -> list[Request]:
    return complete(engine(engines, None), [PROMPT], [sampling_params(sampler, 6, NUM_COMPARED)])[0]


def cells() -> Iterator[tuple[str, str, str]]:
    """(method, rule, sampler): all of them for one of every way to draft, and for a tree; the others, which share their
    code, have every sampler once, and at a temperature every rule."""
    for number, method in enumerate(METHODS):
        for (turn, rule), (place, sampler) in itertools.product(enumerate(RULES), enumerate(SAMPLERS)):
            if method in (*ONE_OF_A_KIND, "token_recycling") or (number + turn + place) % len(RULES) == 0:
                yield method, rule, sampler


@pytest.mark.parametrize(("method", "rule", "sampler"), list(cells()))
def test_a_cell_keeps_what_its_rule_promises(engines: Engines, method: str, rule: str, sampler: str) -> None:
    config = method_config(method, 2, rejection_sample_method=rule)
    if "prompt_lookup_min" in config:  # of six tokens something always matches; the longer n-grams match less
        config["prompt_lookup_min"] = 1
    llm = engine(engines, config)
    num_requests = NUM_REQUESTS if method in ONE_OF_A_KIND else NUM_REQUESTS // 2
    keeps_tokens = rule == "strict" or sampler.startswith("greedy")
    params = sampling_params(sampler, 6, NUM_COMPARED) if keeps_tokens else sampling_params(sampler, num_requests)
    plain = plain_texts(engines, sampler)
    tell_test_proposers(plain)
    requests, metrics = complete(llm, [PROMPT], [params])
    assert 0 < metrics.num_accepted_tokens < sum(point.num_draft_tokens for point in metrics.step_points)
    if keeps_tokens:
        assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]
    else:
        distribution = exact_distribution(llm, params)
        assert float(distribution.sum()) == pytest.approx(1.0)
        assert p_value(requests, distribution) > ALPHA


@cache
def plain_sample(engines: Engines, sampler: str) -> list[Request]:
    return complete(engine(engines, None), [PROMPT], [sampling_params(sampler, NUM_REQUESTS)])[0]


def test_plain_decoding_follows_the_exact_distribution(engines: Engines) -> None:
    """The sampler's own test: strict and none could share a bias."""
    llm = engine(engines, None)
    for sampler in ("temperature", "top-k, top-p, min-p", "penalties, bias"):
        distribution = exact_distribution(llm, sampling_params(sampler, NUM_REQUESTS))
        assert p_value(plain_sample(engines, sampler), distribution) > ALPHA


def test_the_sample_finds_a_rule_that_is_slightly_wrong(engines: Engines) -> None:
    """Power: the distribution of a temperature a third off is refused."""
    warmer = dataclasses.replace(sampling_params("temperature", NUM_REQUESTS), temperature=4 / 3)
    distribution = exact_distribution(engine(engines, None), warmer)
    assert p_value(plain_sample(engines, "temperature"), distribution) < ALPHA
