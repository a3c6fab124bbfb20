"""Speculation is a schedule, never a change of the answer: every method says what method=none says, token for token.

The reference is plain decoding with room for everything. Batches mix greedy and sampled requests of every kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from proposers import available_methods
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.metrics import MetricsCollector
from tests.conftest import TARGET_CONFIG, Engines, complete
from tests.proposers_for_tests import KnownText

# What a method cannot do without, or needs so that it drafts often enough here; a new method starts with its defaults.
METHOD_KEYS: dict[str, dict[str, Any]] = {
    "custom_class": {"model": "tests.proposers_for_tests.RaggedProposer"},
    "hybrid": {"min_match_score": 0.4},
    "sparse_kv": {"num_sink_tokens": 0, "num_recent_tokens": 1},  # the least: texts are short
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "ngram_gpu": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
}
METHODS = [method for method in available_methods() if method != "none"]
# One of every way to draft; the others share its loop, and are with it in the wider tests.
ONE_OF_A_KIND = ("custom_class", "draft_model", "eagle3", "medusa", "ngram_gpu", "pard")
ROOMY = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
NUM_PROMPT_TOKENS = (5, 1, 16, 17, 40, 33, 3, 90, 15, 31, 60, 8)
# Texts are longer than a block of the cache, and no longer than that takes: every step costs as much as any other.
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=18, frequency_penalty=0.6),
    SamplingParams(temperature=0.0, max_tokens=18, repetition_penalty=1.3, logit_bias={7: 3.0, 9: -50.0}),
    SamplingParams(max_tokens=21, seed=11, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=8, max_tokens=17, seed=12),
    SamplingParams(temperature=1.3, top_p=0.8, max_tokens=19, seed=2**64 - 1),
    SamplingParams(temperature=0.9, min_p=0.1, presence_penalty=0.5, max_tokens=18, seed=13),
    SamplingParams(n=3, max_tokens=17, seed=14),
    SamplingParams(max_tokens=20, min_tokens=9, stop_token_ids=tuple(range(20, 40)), seed=15),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, max_tokens=1, seed=16),
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.5, frequency_penalty=-0.4, max_tokens=24, seed=17, logit_bias={2: 1.0}),
)


def prompt_token_ids(length: int) -> list[int]:
    """Tokens with a period that is broken now and then, so that n-grams match, sometimes in vain."""
    vocab_size = TARGET_CONFIG["vocab_size"]
    return [(length * 7 + (i % 9) * 5 + i // 31 * 3) % vocab_size for i in range(length)]


PROMPTS = [{"prompt_token_ids": prompt_token_ids(length)} for length in NUM_PROMPT_TOKENS]


def answers(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [(request.output_token_ids, request.finish_reason, request.stop_reason) for request in requests]


def counts(metrics: MetricsCollector) -> tuple[int, int]:
    """(drafted, accepted) tokens."""
    return sum(point.num_draft_tokens for point in metrics.step_points), metrics.num_accepted_tokens


def tell_test_proposers(requests: list[Request]) -> None:
    KnownText.continuations = {request.request_id: list(request.output_token_ids) for request in requests}


@pytest.fixture
def reference(plain: list[Request]) -> list[tuple[Any, ...]]:
    """Plain decoding's answers, request by request; test proposers know them."""
    tell_test_proposers(plain)
    return answers(plain)


def method_config(method: str, num_speculative_tokens: int, **keys: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": num_speculative_tokens, **METHOD_KEYS.get(method, {}), **keys}


def test_the_reference_holds_requests_of_every_end(reference: list[tuple[Any, ...]]) -> None:
    """Guards the workload: ends by eos, stop token and length, long texts, and texts that differ between children."""
    assert {("stop", True), ("stop", False), ("length", True)} <= {(end, why is None) for _, end, why in reference}
    assert len({tuple(tokens) for tokens, _, _ in reference}) == len(reference)
    assert sum(len(tokens) for tokens, _, _ in reference) > 150


@pytest.mark.parametrize("num_speculative_tokens", [1, 16])  # 4 in the tests below
@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_no_token(
    engines: Engines, reference: list[tuple[Any, ...]], method: str, num_speculative_tokens: int
) -> None:
    requests, metrics = complete(engines(method_config(method, num_speculative_tokens), **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == reference
    drafted, accepted = counts(metrics)
    assert 0 < accepted < drafted, "a test of a method that is never right, or never wrong, would show little"


@pytest.mark.parametrize("method", METHODS)
def test_a_restart_forgets_all_that_earlier_requests_taught(engines: Engines, method: str) -> None:
    """Otherwise a method is measured with what it learned from the warm-up, which runs the workload itself."""
    llm, some = engines(method_config(method, 16), **ROOMY), slice(3, 6)
    seen = []
    for _ in range(2):
        llm.engine.proposer.restart()
        _, metrics = complete(llm, PROMPTS[some], PARAMS[some])
        seen.append([(record.request_id, record.drafts) for record in metrics.records])
    assert seen[0] == seen[1], "what a proposer keeps from request to request it must forget in `restart`"


SCHEDULES: dict[str, dict[str, Any]] = {
    "one request at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 4096},
    "three at a time": {"max_num_seqs": 3, "max_num_batched_tokens": 4096},
    "chunks down to one token": {"max_num_seqs": 3, "max_num_batched_tokens": 15},
    "odd chunks": {"max_num_seqs": 7, "max_num_batched_tokens": 37},
    "no chunks": {"max_num_batched_tokens": 320, "enable_chunked_prefill": False},
    "blocks of 32": {"block_size": 32, **ROOMY},
    "few blocks": {"num_gpu_blocks_override": 8, **ROOMY},
    "few blocks of 32, small chunks": {
        "num_gpu_blocks_override": 4, "block_size": 32, "max_num_seqs": 6, "max_num_batched_tokens": 31,
    },
}  # fmt: skip


def cells() -> Iterator[tuple[str, str]]:
    """(method, schedule): the hardest schedule for every method, and every other one in turns, so that of two methods
    of one loop each has what the other has not; all of them for plain decoding and for drafts of every length."""
    for number, method in enumerate(["none", *METHODS]):
        for place, schedule in enumerate(SCHEDULES):
            if method in ("none", "custom_class") or "small chunks" in schedule or (number + place) % 2:
                yield method, schedule


@pytest.mark.parametrize(("method", "schedule"), list(cells()))
def test_the_schedule_changes_no_token(
    engines: Engines, reference: list[tuple[Any, ...]], method: str, schedule: str
) -> None:
    requests, _ = complete(engines(method_config(method, 4), **SCHEDULES[schedule]), PROMPTS, PARAMS)
    assert answers(requests) == reference
    if "few blocks" in schedule:
        assert any(request.num_preemptions for request in requests)
    else:
        assert not any(request.num_preemptions for request in requests)


@pytest.mark.parametrize("method", ["none", *ONE_OF_A_KIND])
def test_the_order_of_requests_changes_no_token(
    engines: Engines, reference: list[tuple[Any, ...]], method: str
) -> None:
    """Under chunks and preemption, so that neighbours differ all the way. Requests are greedy or seeded."""
    order = [7, 3, 11, 0, 9, 5, 1, 10, 8, 2, 6, 4]
    llm = engines(method_config(method, 4), num_gpu_blocks_override=10, max_num_seqs=6, max_num_batched_tokens=47)
    requests, _ = complete(llm, [PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    first_of = {i: sum(params.n for params in PARAMS[:i]) for i in order}
    assert answers(requests) == [
        reference[first_of[i] + child] for i in order for child in range(PARAMS[i].n)
    ]  # fmt: skip
    assert any(request.num_preemptions for request in requests)


@pytest.mark.parametrize(("schedule", "rule"), [("three at a time", "strict"), ("few blocks", "probabilistic")])
def test_ngram_gpu_says_and_counts_what_ngram_does(engines: Engines, schedule: str, rule: str) -> None:
    """Slots that hold no draft are not drafted, and leave the token to the noise that plain decoding has there."""
    runs = []
    for method in ("ngram", "ngram_gpu"):
        config = method_config(method, 4, rejection_sample_method=rule)
        requests, metrics = complete(engines(config, **SCHEDULES[schedule]), PROMPTS, PARAMS)
        steps = {
            record.request_id: (record.tokens_per_step, record.num_draft_tokens, record.num_accepted_tokens)
            for record in metrics.records
        }
        runs.append((answers(requests), steps))
    assert runs[0] == runs[1]
    assert any(0 in drafted[1:] for _, drafted, _ in runs[1][1].values()), "some steps must find nothing"


@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic", "coupled"])
def test_how_a_draft_is_drawn_changes_no_token(
    engines: Engines, reference: list[tuple[Any, ...]], draft_sample_method: str
) -> None:
    config = method_config("draft_model", 5, rejection_sample_method="strict", draft_sample_method=draft_sample_method)
    requests, metrics = complete(engines(config, **ROOMY), PROMPTS, PARAMS)
    assert answers(requests) == reference
    assert counts(metrics)[1] > 0


def test_a_coupled_draft_is_accepted_more_often_than_an_independent_one(engines: Engines) -> None:
    accepted = {}
    for draft_sample_method in ("probabilistic", "coupled"):
        keys = {"rejection_sample_method": "strict", "draft_sample_method": draft_sample_method}
        llm = engines(method_config("draft_model", 5, **keys), **ROOMY)
        _, metrics = complete(llm, PROMPTS, PARAMS)
        drafted, right = counts(metrics)
        accepted[draft_sample_method] = right / drafted
    assert accepted["coupled"] > 1.5 * accepted["probabilistic"]


GREEDY = [SamplingParams(temperature=0.0, max_tokens=17, frequency_penalty=0.1 * i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain_greedy(engines: Engines) -> list[Request]:
    return complete(engines(**ROOMY), PROMPTS, GREEDY)[0]


@pytest.mark.parametrize(
    ("rule", "method"), list(zip(itertools.cycle(["probabilistic", "block"]), METHODS, strict=False))
)
def test_at_temperature_zero_a_lossless_rule_changes_no_token(
    engines: Engines, plain_greedy: list[Request], method: str, rule: str
) -> None:
    """The rules in turns, under preemption; test_every_cell.py has one of every way to draft under both."""
    tell_test_proposers(plain_greedy)
    config = method_config(method, 4, rejection_sample_method=rule)
    requests, metrics = complete(engines(config, num_gpu_blocks_override=11, **ROOMY), PROMPTS, GREEDY)
    assert answers(requests) == answers(plain_greedy)
    assert counts(metrics)[1] > 0


def test_a_run_repeats_itself_on_the_same_engine(engines: Engines, reference: list[tuple[Any, ...]]) -> None:
    """Nothing of a finished run, cache content included, reaches the next one."""
    llm = engines(method_config("draft_model", 4), num_gpu_blocks_override=11, **ROOMY)
    for _ in range(2):
        requests, _ = complete(llm, PROMPTS, PARAMS)
        assert answers(requests) == reference


def test_a_draft_of_shorter_context_stops_guessing_and_changes_no_token(
    engines: Engines, reference: list[tuple[Any, ...]]
) -> None:
    llm = engines(method_config("draft_model", 4, max_model_len=36), **ROOMY)
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == reference
    for record in metrics.records:
        drafted_at = [
            len(record.prompt_token_ids) + sum(record.tokens_per_step[:step])
            for step, count in enumerate(record.num_draft_tokens)
            if count > 0
        ]
        assert all(position < 36 for position in drafted_at)
    assert counts(metrics)[1] > 0


@pytest.fixture(scope="module")
def plain_bfloat16(engines: Engines) -> list[Request]:
    return complete(engines(dtype="bfloat16", **ROOMY), PROMPTS, PARAMS)[0]


@pytest.mark.parametrize("method", ONE_OF_A_KIND)
def test_bfloat16_changes_no_token_of_its_own_plain_decoding(
    engines: Engines, plain_bfloat16: list[Request], method: str
) -> None:
    """Rounding is coarse there, so logits tie and almost tie all the time."""
    tell_test_proposers(plain_bfloat16)
    llm = engines(
        method_config(method, 5), dtype="bfloat16", max_num_seqs=5, max_num_batched_tokens=33, num_gpu_blocks_override=9
    )
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == answers(plain_bfloat16)
    assert counts(metrics)[1] > 0 and any(request.num_preemptions for request in requests)
