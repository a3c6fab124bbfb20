"""Whether every method says plain decoding's very tokens: greedy and seeded requests, several batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.benchmarks.decoding_cases import eagle3, free_guesses
from runner.benchmarks.shared_target import SharedTarget
from runner.engine.sampling_params import SamplingParams
from runner.metrics import MetricsCollector, RequestRecord
from runner.metrics.rates import count_identical
from runner.prompts import make_requests

NUM_TEXTS = 8  # greedy and seeded ones in turn


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Another way to the texts of plain decoding with all requests at once."""

    label: str
    method: Mapping[str, Any] | None
    max_concurrency: int
    num_passes: int = 1  # the last one counts; in those before it the method may learn


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
VARIANTS = (
    Variant(label="none, one at a time", method=None, max_concurrency=1),
    Variant(label="ngram, 4 tokens", method=NGRAM, max_concurrency=NUM_TEXTS),
    Variant(label="suffix, 8 tokens, texts seen before", method=SUFFIX, max_concurrency=NUM_TEXTS, num_passes=2),
    Variant(label="suffix, 8 tokens, 3 at a time", method=SUFFIX, max_concurrency=3, num_passes=2),
    Variant(label="eagle3, 7 tokens", method=eagle3(7), max_concurrency=NUM_TEXTS),
    Variant(label="free guesses, 7 tokens, one at a time", method=free_guesses(7), max_concurrency=1),
)


def plain_texts(target: SharedTarget) -> list[RequestRecord]:
    """Plain decoding of all requests at once, what the others are held to."""
    return _complete(target, None, NUM_TEXTS).records


def count_equal_texts(target: SharedTarget, variant: Variant, plain: Sequence[RequestRecord]) -> dict[str, int]:
    """{requests, identical, accepted}: how many have plain decoding's tokens, and how many of those were drafts."""
    for _ in range(variant.num_passes):
        metrics = _complete(target, variant.method, variant.max_concurrency)
    return {**count_identical(metrics.records, plain), "accepted": metrics.num_accepted_tokens}


def _complete(target: SharedTarget, method: Mapping[str, Any] | None, max_concurrency: int) -> MetricsCollector:
    llm, length = target.engine(method, NUM_TEXTS), target.new_tokens
    greedy = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    seeded = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=length, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in target.prompts(NUM_TEXTS)]
    params = [seeded if index % 2 else greedy for index in range(NUM_TEXTS)]
    metrics = MetricsCollector()
    requests = make_requests(prompts, params, llm.engine.tokenizer, llm.config.seed)
    llm.run(requests, llm.engine.proposer, metrics, max_concurrency=max_concurrency)
    return metrics
