"""Control by load: how many drafts a step makes at which load, and that K may change from step to step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proposers import available_methods
from runner.engine.draft_budget import DraftBudget
from runner.engine.launch import Part
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from tests.conftest import Engines, complete
from tests.test_losslessness import (
    METHODS,
    ONE_OF_A_KIND,
    PARAMS,
    PROMPTS,
    ROOMY,
    answers,
    method_config,
    tell_test_proposers,
)
from tests.test_scheduler import Traffic, make_request, make_scheduler


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Ascending, the first from 1, with gaps and without."""
    found, start = [], 1
    for _ in range(draw(st.integers(1, 4))):
        end = start + draw(st.integers(0, 5))
        found.append((start, end, draw(st.integers(0, 9))))
        start = end + draw(st.integers(1, 4))
    return found


@given(ranges(), st.integers(0, 8), st.integers(1, 60))
def test_gaps_and_the_tail_keep_the_k_before_them(
    per_batch_size: list[tuple[int, int, int]], num_speculative_tokens: int, num_running: int
) -> None:
    """vLLM's definition, written out: a table of every batch size."""
    table, count = {}, 0
    for size in range(1, 61):
        count = next((tokens for start, end, tokens in per_batch_size if start <= size <= end), count)
        table[size] = min(count, num_speculative_tokens)
    budget = DraftBudget(num_speculative_tokens=num_speculative_tokens, per_batch_size=per_batch_size)
    assert budget.max_draft_tokens(num_running, num_waiting=99) == table[num_running]


@pytest.mark.parametrize(("running", "waiting", "drafts"), [(3, 1, 4), (4, 0, 4), (4, 1, 0), (1, 4, 0), (5, 0, 0)])
def test_no_drafts_while_more_requests_run_or_wait_than_that(running: int, waiting: int, drafts: int) -> None:
    budget = DraftBudget(num_speculative_tokens=4, disable_by_batch_size=4)
    assert budget.max_draft_tokens(running, waiting) == drafts


def test_the_scheduler_follows_the_number_of_running_requests() -> None:
    scheduler = make_scheduler(num_speculative_tokens=4, per_batch_size=[(1, 1, 9), (2, 2, 1), (4, 4, 0)])
    traffic = Traffic(scheduler=scheduler)
    traffic.add(*(make_request(2, request_id=str(i), max_tokens=20 * (i + 1)) for i in range(4)))
    most: dict[int, int] = {}  # running requests -> the longest draft allowed; it is shorter before max_tokens
    while scheduler.has_unfinished:
        running = len(scheduler.running)
        schedule, _ = traffic.step()
        most[running] = max([most.get(running, 0), *(item.max_draft_tokens for item in schedule.decoding)])
    assert most == {0: 0, 4: 0, 3: 1, 2: 1, 1: 4}


def test_the_scheduler_counts_those_that_wait_before_it_speculates() -> None:
    traffic = Traffic(scheduler=make_scheduler(max_num_seqs=1, num_speculative_tokens=4, disable_by_batch_size=2))
    traffic.add(*(make_request(2, request_id=str(i), max_tokens=20) for i in range(4)))
    most: dict[int, int] = {}  # requests in line -> the longest draft allowed
    while traffic.scheduler.has_unfinished:
        in_line = traffic.scheduler.num_unfinished
        schedule, _ = traffic.step()
        most[in_line] = max([most.get(in_line, 0), *(item.max_draft_tokens for item in schedule.decoding)])
    assert most == {4: 0, 3: 0, 2: 4, 1: 4}


# Under the lossless suite's workload of 14 requests, all of one length or another.
LOADS: dict[str, dict[str, Any]] = {
    "0 and 4 in turn": {
        "num_speculative_tokens_per_batch_size": [(n, n, 4 * (n % 2)) for n in range(1, 15)],
    },
    "fewer as more run": {"num_speculative_tokens_per_batch_size": [(1, 2, 4), (3, 6, 2), (7, 9, 1), (10, 64, 0)]},
    "none while many are in line": {"disable_by_batch_size": 7},
}  # fmt: skip


def cells() -> Iterator[tuple[str, str]]:
    """(method, load): drafts that come and go for every method, and the two that are like it in turns."""
    always, *others = LOADS
    for number, method in enumerate(METHODS):
        yield method, always
        yield method, others[number % len(others)]


@pytest.mark.parametrize(("method", "load"), list(cells()))
def test_control_by_load_changes_no_token(engines: Engines, plain: list[Request], method: str, load: str) -> None:
    tell_test_proposers(plain)
    room = {**ROOMY, "max_num_seqs": 6} if load == "none while many are in line" else ROOMY
    requests, metrics = complete(engines({**method_config(method, 4), **LOADS[load]}, **room), PROMPTS, PARAMS)
    assert answers(requests) == answers(plain)
    drafted = [point.num_draft_tokens for point in metrics.step_points]
    assert 0 in drafted[1:]
    assert any(drafted)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        *((method, "strict") for method in available_methods()),
        *((method, rule) for method in ONE_OF_A_KIND for rule in ("probabilistic", "synthetic")),
    ],
)
def test_every_method_takes_a_draft_length_of_zero(
    engines: Engines, plain: list[Request], method: str, rule: str
) -> None:
    rate = {"synthetic_acceptance_rate": 0.5} if rule == "synthetic" else {}
    config = method_config(method, 0, rejection_sample_method=rule, **rate)
    requests, metrics = complete(engines(config, **ROOMY), PROMPTS[:3], PARAMS[:3])
    assert answers(requests) == answers(plain[:3])
    assert not any(point.num_draft_tokens for point in metrics.step_points)


def test_the_baseline_takes_no_part_in_control_by_load(engines: Engines) -> None:
    llm = engines({**method_config("ngram", 4), "num_speculative_tokens_per_batch_size": [[1, 64, 4]]}, **ROOMY)
    outputs = llm.generate(PROMPTS[0], PARAMS[0])
    assert outputs == engines(**ROOMY).generate(PROMPTS[0], PARAMS[0])
    assert llm.engine.plain_proposer.num_speculative_tokens == 0


@pytest.mark.parametrize("pieces", [512, 3])
def test_a_draft_models_cache_catches_up_after_steps_without_drafts(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """The draft is the target itself, so it is right as long as its cache holds the text; five requests of different
    lengths end one by one, and K is 4 while an odd number of them runs. The long gaps are read in pieces."""
    monkeypatch.setattr("proposers.draft_model.MAX_CATCH_UP_TOKENS", pieces)
    config = {
        **method_config("draft_model", 4),
        "num_speculative_tokens_per_batch_size": [[n, n, 4 * (n % 2)] for n in range(1, 6)],
    }
    llm = engines(config, architecture={"num_hidden_layers": 1}, **ROOMY)
    runner: Any = llm.engine.proposer.runner  # type: ignore[attr-defined]
    launches, run = list[list[Part]](), runner.run
    monkeypatch.setattr(runner, "run", lambda parts, *args: (launches.append(list(parts)), run(parts, *args))[1])
    lengths = (20, 33, 50, 64, 90)
    params = [SamplingParams(temperature=0.9, seed=n, max_tokens=n, ignore_eos=True) for n in lengths]
    requests, metrics = complete(llm, PROMPTS[:5], params)
    catching_up = [parts for parts in launches if parts[0].num_logits == 0 and parts[0].start > 0]
    assert {len(parts) for parts in catching_up} == {3, 1}, "all requests in one launch"
    longest_piece = max(part.end - part.start for parts in catching_up for part in parts)
    assert longest_piece == 3 if pieces == 3 else longest_piece > 3
    expected, _ = complete(engines(architecture={"num_hidden_layers": 1}, **ROOMY), PROMPTS[:5], params)
    assert answers(requests) == answers(expected)
    longest = next(record for record in metrics.records if record.request_id == "4")
    assert longest.num_accepted_tokens == longest.num_draft_tokens, "every draft is right"
    changes = sum((a > 0) != (b > 0) for a, b in itertools.pairwise(longest.num_draft_tokens))
    assert changes >= 4, "none, then drafts, then none, then drafts again"
    assert longest.num_draft_tokens.count(0) > 20


def test_a_head_follows_all_prompts_of_a_step_in_one_launch(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took one for each request, which a burst of prompts waited for."""
    llm = engines(method_config("eagle3", 4), **ROOMY)
    runner: Any = llm.engine.proposer.runner  # type: ignore[attr-defined]
    launches, run = list[tuple[str, int]](), runner.run
    monkeypatch.setattr(runner, "run", lambda *args: (launches.append((args[0], len(args[1]))), run(*args))[1])
    complete(llm, PROMPTS[2:6], [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)] * 4)
    assert [launch for launch in launches if launch[0] == "prefill"] == [("prefill", 4)]


def test_a_request_that_never_drafts_costs_the_draft_model_nothing(engines: Engines) -> None:
    llm = engines(method_config("draft_model", 4), **ROOMY)
    proposer: Any = llm.engine.proposer
    rows: list[int] = []
    run = proposer.runner.run

    def counting(parts: Any, *args: Any) -> Any:
        rows.append(len(parts))
        return run(parts, *args)

    params = SamplingParams(temperature=0.0, max_tokens=8, speculative_sampling=False)
    proposer.runner.run = counting
    try:
        complete(llm, PROMPTS[:2], [params] * 2)
        assert rows == []
        complete(llm, PROMPTS[:2], [params, SamplingParams(temperature=0.0, max_tokens=8)])
        assert set(rows) == {1}
    finally:
        del proposer.runner.run
