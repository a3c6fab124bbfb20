"""What runs before the clock: it must have done all that a timed pass does for the first time."""

from __future__ import annotations

from typing import Any

import pytest

from proposers.base import Proposer
from runner import passes
from runner.engine.graphs import GraphStore
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.passes import WARM_UP_STEPS, run_pass, warm_up
from runner.workload import WorkloadItem
from tests.conftest import TARGET_CONFIG, Engines

PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}]


def test_it_samples_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drew without cut-offs, so that what cuts was compiled on the clock: 25 tokens/s where there are 700."""
    llm = LLM("dummy", device="cpu", load_format="dummy", hf_config=TARGET_CONFIG, dtype="float32")
    sampler = llm.config.sampler.model_copy(update={"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_tokens": 2})
    llm.config = llm.config.model_copy(update={"sampler": sampler})
    items = [
        WorkloadItem(prompt=PROMPTS[0], sampling={"temperature": 0.9, "max_tokens": 3}),
        WorkloadItem(prompt=PROMPTS[1]),
    ]
    run, asked = llm.run, list[list[SamplingParams]]()

    def spy(requests: list[Request], *args: Any, **how: Any) -> Any:
        asked.append([request.sampling_params for request in requests])
        return run(requests, *args, **how)

    monkeypatch.setattr(llm, "run", spy)
    warm_up(llm, items, [llm.engine.proposer], max_concurrency=None)
    run_pass(llm, llm.engine.proposer, items, MetricsCollector(), max_concurrency=None)
    *before, timed = asked
    assert before and all(params == timed for params in before)


@pytest.mark.parametrize("max_concurrency", [None, 2])
def test_a_timed_pass_captures_nothing(engines: Engines, max_concurrency: int | None) -> None:
    """Two requests were tried, and batches of other sizes captured on the clock: 0.59x where it is 0.96x."""
    llm = engines({"method": "draft_model", "num_speculative_tokens": 3}, max_num_seqs=6)
    params = {"max_tokens": 24, "temperature": 0.0}
    lengths = (3, 5, 4, 8, 6)
    items = [WorkloadItem(prompt={"prompt_token_ids": list(range(5, 5 + n))}, sampling=params) for n in lengths]
    proposers = [llm.engine.plain_proposer, llm.engine.proposer]
    warm_up(llm, items, proposers, max_concurrency=max_concurrency)
    num_known = GraphStore.num_first_calls
    for proposer in proposers:
        run_pass(llm, proposer, items, MetricsCollector(), max_concurrency=max_concurrency)
    assert GraphStore.num_first_calls == num_known


def test_of_a_long_workload_the_beginning_is_rehearsed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was asked of its first requests by then is forgotten."""
    monkeypatch.setattr(passes, "WARM_UP_SECONDS", 0.0)
    llm, seen = engines({"method": "ngram", "num_speculative_tokens": 2}), list[MetricsCollector]()
    items = [WorkloadItem(prompt=prompt, sampling={"max_tokens": 100}) for prompt in PROMPTS * 20]
    run = llm.run

    def spy(requests: list[Request], proposer: Proposer, metrics: MetricsCollector, **how: Any) -> Any:
        seen.append(metrics)
        return run(requests, proposer, metrics, **how)

    monkeypatch.setattr(llm, "run", spy)
    warm_up(llm, items, [llm.engine.proposer], max_concurrency=1)
    (metrics,) = seen
    assert len(metrics.step_points) == WARM_UP_STEPS
    assert all(record.finish_reason == "abort" for record in metrics.records)


def test_requests_that_cannot_run_are_no_rehearsal(engines: Engines) -> None:
    """Nothing was warmed up where the first two were such."""
    llm = engines({"method": "ngram", "num_speculative_tokens": 2}, max_num_seqs=3)
    too_long = {"prompt_token_ids": [5] * 100_000}
    items = [WorkloadItem(prompt=prompt, sampling={"max_tokens": 24}) for prompt in (too_long, too_long, *PROMPTS)]
    warm_up(llm, items, [llm.engine.proposer], max_concurrency=None)
    num_known = GraphStore.num_first_calls
    one = run_pass(llm, llm.engine.proposer, items, MetricsCollector(), max_concurrency=None)
    assert len(one.errors) == 2 and GraphStore.num_first_calls == num_known
    warm_up(llm, items[:2], [llm.engine.proposer], max_concurrency=None)
