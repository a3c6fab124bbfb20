"""Whatever arrives, leaves, waits or is preempted, and whatever K is in a step: the strict text stays what it was.

Hypothesis writes the traffic. The reference is plain decoding of every request with room for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from proposers import available_methods
from runner.engine.draft_budget import DraftBudget
from runner.engine.request import Request, RequestStatus
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.prompts import make_requests
from runner.step_loop import StepLoop
from runner.trace import RequestTraces
from tests.conftest import Engines, complete
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, method_config, tell_test_proposers

MAX_K = 8
METHODS = available_methods()
NUM_EXAMPLES = {"custom_class": 6, "draft_model": 3, "eagle3": 3, "token_recycling": 6, "suffix_recycling": 10}


@dataclass(frozen=True, kw_only=True)
class Move:
    """What happens before one step."""

    num_arrivals: int
    cancelled: int | None  # place among the unfinished requests, modulo their number
    num_speculative_tokens: int


moves = st.builds(
    Move,
    num_arrivals=st.integers(0, 4),
    cancelled=st.none() | st.integers(0, 30),
    num_speculative_tokens=st.integers(0, MAX_K),
)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    order: Sequence[int]  # in which the requests arrive
    moves: Sequence[Move]  # of the first steps; then all arrive, none leaves, and K goes round the same values
    max_num_seqs: int
    max_num_batched_tokens: int


@st.composite
def traffics(draw: st.DrawFn, num_requests: int) -> Traffic:
    max_num_seqs = draw(st.integers(1, 8))
    return Traffic(
        order=draw(st.permutations(range(num_requests))),
        moves=draw(st.lists(moves, min_size=1, max_size=40)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 80)),
    )


NUM_REQUESTS = sum(params.n for params in PARAMS)
BUSY = Traffic(  # few examples are drawn, and those may neither preempt nor cancel what has begun
    order=range(NUM_REQUESTS - 1, -1, -1),
    moves=[
        Move(num_arrivals=4, cancelled=0 if step == 3 else None, num_speculative_tokens=2 * step % (MAX_K + 1))
        for step in range(12)
    ],
    max_num_seqs=8,
    max_num_batched_tokens=80,
)


@pytest.fixture(scope="module")
def reference(engines: Engines) -> dict[str, Request]:
    plain, _ = complete(engines(**ROOMY), PROMPTS, PARAMS)
    tell_test_proposers(plain)
    return {request.request_id: request for request in plain}


def play(llm: LLM, traffic: Traffic) -> tuple[list[Request], list[Request]]:
    """Requests that came to their end, and those cancelled on the way."""
    proposer, metrics = llm.engine.proposer, MetricsCollector()
    scheduler = llm.scheduler_for(proposer)
    scheduler.max_num_seqs = traffic.max_num_seqs
    scheduler.max_num_batched_tokens = traffic.max_num_batched_tokens
    requests = make_requests(PROMPTS, PARAMS, llm.engine.tokenizer, llm.config.seed)
    loop = StepLoop(llm.engine, scheduler, proposer, metrics, RequestTraces(llm.engine.tokenizer.decode, {}))
    arriving = [requests[index] for index in traffic.order]
    cancelled: list[Request] = []
    step = 0
    while arriving or scheduler.has_unfinished:
        move = traffic.moves[step % len(traffic.moves)]
        is_over = step >= len(traffic.moves)
        num_arrivals = len(arriving) if is_over else move.num_arrivals
        for request in arriving[:num_arrivals]:
            scheduler.add(request)
        del arriving[:num_arrivals]
        unfinished = [*scheduler.running, *scheduler.waiting]
        if not is_over and move.cancelled is not None and unfinished:
            victim = unfinished[move.cancelled % len(unfinished)]
            scheduler.abort(victim)
            proposer.release(victim.request_id)
            cancelled.append(victim)
        scheduler.draft_budget = DraftBudget(num_speculative_tokens=move.num_speculative_tokens)
        if scheduler.has_unfinished:
            loop.step()
        step += 1
    llm.engine.block_manager.check_integrity([])
    return [request for request in requests if request.status is RequestStatus.FINISHED], cancelled


@pytest.mark.parametrize("method", METHODS)
def test_no_traffic_changes_a_text(engines: Engines, reference: dict[str, Request], method: str) -> None:
    num_examples = NUM_EXAMPLES.get(method, 1)  # the others share a loop with one of these
    llm = engines(method_config(method, MAX_K), num_gpu_blocks_override=10, max_num_batched_tokens=4096)

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck))
    @given(traffic=traffics(NUM_REQUESTS))
    @example(traffic=BUSY)
    def check(traffic: Traffic) -> None:
        finished, cancelled = play(llm, traffic)
        assert len(finished) + len(cancelled) == NUM_REQUESTS
        for request in finished:
            expected = reference[request.request_id]
            assert request.output_token_ids == expected.output_token_ids, request.request_id
            assert (request.finish_reason, request.stop_reason) == (expected.finish_reason, expected.stop_reason)
        for request in cancelled:
            length = len(request.output_token_ids)
            assert request.output_token_ids == reference[request.request_id].output_token_ids[:length]
        event(f"preempted: {any(request.num_preemptions for request in finished)}")
        event(f"cancelled in the middle: {any(request.output_token_ids for request in cancelled)}")
        seen["preempted"] |= any(request.num_preemptions for request in finished)
        seen["cancelled in the middle"] |= any(request.output_token_ids for request in cancelled)

    seen = {"preempted": False, "cancelled in the middle": False}
    check()
    assert all(seen.values()), f"traffic that never does this shows little: {seen}"
