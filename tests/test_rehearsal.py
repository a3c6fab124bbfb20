"""What runs before the clock: it must have done all that a timed pass does for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proposers.base import Proposer
from runner import rehearsal
from runner.engine.graphs import GraphStore
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.passes import run_pass
from runner.rehearsal import MAX_REHEARSALS, STEPS_OF_A_SIZE, warm_up
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


def first_calls_on_the_clock(llm: LLM, items: list[WorkloadItem], max_concurrency: int | None = None) -> int:
    """Behind a rehearsal that had some."""
    proposers, num_known = [llm.engine.plain_proposer, llm.engine.proposer], GraphStore.num_first_calls
    warm_up(llm, items, proposers, max_concurrency=max_concurrency)
    num_rehearsed = GraphStore.num_first_calls
    assert num_rehearsed > num_known, "nothing is captured here"
    for proposer in proposers:
        run_pass(llm, proposer, items, MetricsCollector(), max_concurrency=max_concurrency)
    return GraphStore.num_first_calls - num_rehearsed


def items_of(lengths: Sequence[int], **sampling: Any) -> list[WorkloadItem]:
    prompts = [{"prompt_token_ids": [5 + place % 50 for place in range(length)]} for length in lengths]
    return [WorkloadItem(prompt=prompt, sampling={"temperature": 0.0, **sampling}) for prompt in prompts]


@pytest.mark.parametrize("method", ["draft_model", "suffix"])
@pytest.mark.parametrize("max_concurrency", [None, 2])
def test_a_timed_pass_captures_nothing(
    monkeypatch: pytest.MonkeyPatch, method: str, max_concurrency: int | None
) -> None:
    """Two requests were tried, and batches of other sizes captured on the clock: 0.59x where it is 0.96x."""
    monkeypatch.setattr(rehearsal, "SECONDS", float("inf"))
    keys = {"method": method, "num_speculative_tokens": 3}
    llm = Engines()(keys, max_num_seqs=6)
    assert first_calls_on_the_clock(llm, items_of((3, 5, 4, 8, 6), max_tokens=24), max_concurrency) == 0


def test_of_a_long_workload_the_beginning_is_rehearsed_and_batches_of_every_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearsal, "SECONDS", 0.0)
    llm, sizes = Engines()({"method": "ngram", "num_speculative_tokens": 2}, max_num_seqs=4), list[list[int]]()
    run = llm.run

    def spy(requests: list[Request], proposer: Proposer, metrics: MetricsCollector, **how: Any) -> Any:
        traces = run(requests, proposer, metrics, **how)
        sizes.append([point.num_requests for point in metrics.step_points])
        assert {record.finish_reason for record in metrics.records} == {"abort"}
        return traces

    monkeypatch.setattr(llm, "run", spy)
    warm_up(llm, items_of([4] * 40, max_tokens=1000, ignore_eos=True), [llm.engine.proposer], max_concurrency=None)
    assert all(max(own) == 4 and 20 < len(own) < 60 for own in sizes)
    assert all(own.count(size) >= STEPS_OF_A_SIZE for own in sizes for size in (1, 2, 3, 4))


def test_prompts_are_no_rehearsal_of_what_comes_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones took up all of it, and every batch was captured on the clock."""
    monkeypatch.setattr(rehearsal, "SECONDS", 0.0)
    small = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "enable_prefix_caching": False}  # else they come together
    llm = Engines()({"method": "draft_model", "num_speculative_tokens": 2}, **small)
    assert first_calls_on_the_clock(llm, items_of([200, 200, 200], max_tokens=50, ignore_eos=True)) == 0


def test_requests_that_cannot_run_are_no_rehearsal(engines: Engines) -> None:
    """Nothing was warmed up where the first two were such."""
    llm = Engines()({"method": "ngram", "num_speculative_tokens": 2}, max_num_seqs=3)
    too_long = WorkloadItem(prompt={"prompt_token_ids": [5] * 100_000})
    assert first_calls_on_the_clock(llm, [too_long, too_long, *items_of((3, 2), max_tokens=24)]) == 0
    warm_up(llm, [too_long] * 2, [llm.engine.proposer], max_concurrency=None)


def test_what_a_rehearsal_taught_is_forgotten(engines: Engines) -> None:
    """Suffix decoding would find every answer."""
    llm, items = engines({"method": "suffix", "num_speculative_tokens": 4}), items_of((6, 3), max_tokens=30)
    counts = []
    for _ in range(2):
        metrics = MetricsCollector()
        run_pass(llm, llm.engine.proposer, items, metrics, max_concurrency=1)
        counts.append([(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records])
        warm_up(llm, items, [llm.engine.proposer], max_concurrency=1)
    assert counts[0] == counts[1]


def test_a_workload_that_always_brings_something_new_is_not_rehearsed_for_ever(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, num_runs = engines({"method": "ngram", "num_speculative_tokens": 2}), 0

    def run(*_: Any, **__: Any) -> None:
        nonlocal num_runs
        num_runs += 1
        monkeypatch.setattr(GraphStore, "num_first_calls", GraphStore.num_first_calls + 1)

    monkeypatch.setattr(llm, "run", run)
    warm_up(llm, items_of([3]), [llm.engine.proposer], max_concurrency=None)
    assert num_runs == MAX_REHEARSALS
