"""The scheduler alone: made-up verdicts instead of a model, and every rule checked after every step.

The engine's own tests show that a schedule changes no token; these show that it is a fair and bounded one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.base import draft_tokens_from_lists
from runner.engine.block_manager import BlockManager
from runner.engine.draft_budget import DraftBudget
from runner.engine.request import DraftTokens, Request, RequestStatus, VerifyOutput
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import CommittedTokens, Schedule
from runner.engine.scheduler import Scheduler
from runner.engine.stopping import StopRules

EOS, VOCAB_SIZE = 0, 32


def make_scheduler(
    *,
    num_blocks: int = 64,  # usable ones
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    enable_chunked_prefill: bool = True,
    num_speculative_tokens: int = 4,
    fills_blocks: Callable[[Request], bool] | None = None,
    **control_by_load: Any,
) -> Scheduler:
    return Scheduler(
        block_manager=BlockManager(num_blocks + 1, block_size),
        stop_rules=StopRules(eos_token_ids=frozenset({EOS}), max_model_len=max_model_len),
        vocab_size=VOCAB_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        draft_budget=DraftBudget(num_speculative_tokens=num_speculative_tokens, **control_by_load),
        fills_blocks=fills_blocks,
    )


def make_request(num_prompt_tokens: int, *, request_id: str = "0", **params: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[1 + i % (VOCAB_SIZE - 1) for i in range(num_prompt_tokens)],
        sampling_params=SamplingParams(**params),
        seed=0,
    )


def verdict(rows: list[list[int]]) -> VerifyOutput:
    """Each row the accepted drafts of a request that yields, and the token behind them."""
    widest = max((len(row) for row in rows), default=1)
    padded = [row + [-1] * (widest - len(row)) for row in rows]
    return VerifyOutput(
        token_ids=torch.tensor(padded, dtype=torch.int64).view(len(rows), widest),
        num_accepted_tokens=torch.tensor([len(row) - 1 for row in rows], dtype=torch.int64),
    )


def drafts_of(counts: list[int]) -> DraftTokens:
    return draft_tokens_from_lists([[1] * count for count in counts], torch.device("cpu"))


@dataclass(kw_only=True)
class Traffic:
    """Requests in order of arrival, driven step by step; checks after each one what must always hold."""

    scheduler: Scheduler
    generator: random.Random = field(default_factory=lambda: random.Random(0))
    tokens: list[int] = field(default_factory=lambda: [1])  # what the model says, one of these a time
    requests: list[Request] = field(default_factory=list)
    num_steps: int = 0
    num_computed_tokens: int = 0  # of prompts and outputs, over all steps
    keeps_order: bool = True  # nobody is passed over
    waits: Request | None = None  # the oldest one, if the last step was without it

    def add(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.refusal(request) is None
            self.scheduler.add(request)
            self.requests.append(request)

    def step(self) -> tuple[Schedule, list[CommittedTokens]]:
        unfinished = [*self.scheduler.running, *self.scheduler.waiting]
        was_running = list(self.scheduler.running)
        schedule = self.scheduler.schedule()
        self._check_schedule(schedule, unfinished, was_running)
        counts = [self.generator.randint(0, item.max_draft_tokens) for item in schedule.decoding]
        drafted = dict(zip([item.request.request_id for item in schedule.decoding], counts, strict=True))
        rows = []
        for item in schedule.scheduled:
            if item.yields_token:
                accepted = self.generator.randint(0, drafted.get(item.request.request_id, 0))
                rows.append([self.generator.choice(self.tokens) for _ in range(accepted + 1)])
        num_tokens = {item.request.request_id: item.request.num_tokens for item in schedule.scheduled}
        committed = self.scheduler.commit(schedule, verdict(rows).read(drafts_of(counts)))
        self.computed(schedule)
        for item in schedule.scheduled:
            request = item.request
            if item.yields_token:  # all but the last token are in the cache, wherever the step was cut
                assert request.num_computed_tokens == request.num_tokens - 1
            else:
                assert request.num_computed_tokens == item.start + item.num_new_tokens < request.num_tokens
        for gain in committed:
            request = gain.request
            assert request.num_tokens == num_tokens[request.request_id] + len(gain.token_ids)
            assert request.output_token_ids[-len(gain.token_ids) :] == gain.token_ids
            assert len(request.output_token_ids) <= request.sampling_params.max_tokens
            assert request.num_tokens <= self.scheduler.stop_rules.max_model_len
            assert 0 <= gain.num_accepted_tokens <= gain.num_draft_tokens
            assert len(gain.token_ids) - gain.num_accepted_tokens in (0, 1)
        self.num_steps += 1
        self.num_computed_tokens += sum(item.num_new_tokens for item in schedule.scheduled)
        self.check_order_and_blocks()
        return schedule, committed

    def computed(self, schedule: Schedule) -> None:
        """A step is over."""

    def _check_schedule(self, schedule: Schedule, unfinished: list[Request], was_running: list[Request]) -> None:
        scheduler, items = self.scheduler, schedule.scheduled
        assert sum(item.num_reserved_tokens for item in items) <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert len({item.request.request_id for item in items}) == len(items)
        assert len({item.is_decoding for item in items}) == 1, "a step decodes, or computes prompts"
        oldest = unfinished[0]
        has_moved = oldest in [item.request for item in items]
        assert has_moved or oldest is not self.waits, "the oldest request moves in every other step"
        self.waits = None if has_moved else oldest
        assert schedule.preempted == was_running[::-1][: len(schedule.preempted)], "the latest go first"
        for item in items:
            request = item.request
            assert request.status is RequestStatus.RUNNING and request in scheduler.running
            assert item.start == request.num_computed_tokens and item.num_new_tokens >= 1
            assert scheduler.blocks.num_blocks_for(item.start + item.num_reserved_tokens) <= len(request.block_table)
            assert item.yields_token == (item.start + item.num_new_tokens == request.num_tokens)
            assert item.is_decoding == (request.num_tokens == item.start + 1 > request.num_prompt_tokens)
            assert request in was_running or not schedule.preempted, "nobody comes in while others are thrown out"
            assert item.max_draft_tokens <= (scheduler.draft_budget.num_speculative_tokens if item.is_decoding else 0)
            if not scheduler.enable_chunked_prefill:
                assert item.yields_token
        self.check_order_and_blocks()

    def check_order_and_blocks(self) -> None:
        """First come, first served; and no block is lost, shared, or kept by a request that does not run."""
        in_line = [*self.scheduler.running, *self.scheduler.waiting]
        unfinished = [request for request in self.requests if not request.is_finished]
        if self.keeps_order:
            assert in_line == unfinished
        assert sorted(map(id, in_line)) == sorted(map(id, unfinished))
        self.scheduler.blocks.check_integrity([request.block_table for request in self.requests])
        for request in self.requests:
            assert not request.block_table or request in self.scheduler.running

    def finish(self) -> None:
        """To the end, within two steps for each token: the oldest request computes one at least in every other step."""
        limit = self.num_steps + 2 * sum(
            request.num_prompt_tokens + request.sampling_params.max_tokens for request in self.requests
        )
        while self.scheduler.has_unfinished:
            assert self.num_steps < limit, "requests starve"
            self.step()
        assert self.scheduler.blocks.num_free_blocks == self.scheduler.blocks.num_usable_blocks


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Engines of one to three requests' worth of blocks, and budgets from a token to more than a prompt."""
    max_model_len, block_size = draw(st.integers(8, 64)), draw(st.sampled_from([1, 4, 16]))
    chunks, budget = draw(st.booleans()), draw(st.integers(1, 96))
    return {
        "num_blocks": draw(st.integers(max_model_len, 3 * max_model_len)) // block_size + 1,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": budget if chunks else max(budget, max_model_len),  # as assembly demands
        "enable_chunked_prefill": chunks,
        "num_speculative_tokens": draw(st.integers(0, 6)),
    }


@settings(max_examples=80)
@given(shape=shapes(), seed=st.integers(0, 2**16))
def test_any_traffic_keeps_the_rules_and_ends(shape: dict[str, Any], seed: int) -> None:
    """Requests come in bursts, some are taken out again; Traffic checks every step."""
    generator, scheduler = random.Random(seed), make_scheduler(**shape)
    traffic = Traffic(scheduler=scheduler, generator=generator, tokens=[*range(1, 30), EOS])
    for event in range(30):
        if generator.random() < 0.5:
            num_prompt_tokens = generator.randint(1, shape["max_model_len"] - 1)
            params = {"max_tokens": generator.randint(1, 40), "ignore_eos": generator.random() < 0.5}
            traffic.add(make_request(num_prompt_tokens, request_id=str(event), **params))
        elif in_line := [*scheduler.running, *scheduler.waiting]:
            if generator.random() < 0.1:
                scheduler.abort(generator.choice(in_line))
                traffic.check_order_and_blocks()
            else:
                traffic.step()
    traffic.finish()
    for request in traffic.requests:
        if request.status is RequestStatus.FINISHED:
            is_full = len(request.output_token_ids) == request.sampling_params.max_tokens
            is_full |= request.num_tokens == shape["max_model_len"]
            assert is_full or (request.output_token_ids[-1] == EOS and request.finish_reason == "stop")


@pytest.mark.parametrize("num_speculative_tokens", [0, 4])
@pytest.mark.parametrize("lengths", [(1600, 4000), (4000, 1600), (1600, 4000, 1600, 4000, 1600)])
def test_a_long_prompt_is_not_admitted_and_preempted_in_turns(
    lengths: tuple[int, ...], num_speculative_tokens: int
) -> None:
    """A prompt of 4000 tokens was admitted for its first chunk beside a running request, ran out of blocks, was
    preempted, and began again as soon as the blocks it had given back were free."""
    traffic = Traffic(
        scheduler=make_scheduler(
            num_blocks=300, block_size=16, max_model_len=4800, max_num_batched_tokens=2048,
            num_speculative_tokens=num_speculative_tokens,
        )
    )  # fmt: skip
    traffic.add(*(make_request(length, request_id=str(i), max_tokens=200) for i, length in enumerate(lengths)))
    traffic.finish()
    assert traffic.num_computed_tokens < 2 * sum(length + 200 for length in lengths)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), num_blocks=st.integers(40, 120))
def test_under_pressure_a_request_starts_again_only_after_others_made_room(seed: int, num_blocks: int) -> None:
    """Recomputing is bounded by the number of requests, not of steps."""
    generator = random.Random(seed)
    scheduler = make_scheduler(num_blocks=num_blocks, num_speculative_tokens=generator.randint(0, 4))
    traffic = Traffic(scheduler=scheduler, generator=generator)
    lengths = [generator.randint(1, 60) for _ in range(12)]
    traffic.add(*(make_request(length, request_id=str(i), max_tokens=60) for i, length in enumerate(lengths)))
    traffic.finish()
    for place, request in enumerate(traffic.requests):
        assert request.num_preemptions <= 2 * place, "at most twice for each request that was there before"
    assert traffic.num_computed_tokens < 2 * sum(request.num_tokens for request in traffic.requests)


def test_the_latest_request_is_preempted_and_is_the_first_to_come_back() -> None:
    """Nine blocks of four hold three prompts of 12 tokens; the first token to need a tenth block costs the latest."""
    traffic = Traffic(scheduler=make_scheduler(num_blocks=10, num_speculative_tokens=0))
    first, second, third = (make_request(12, request_id=str(i), max_tokens=6) for i in range(3))
    traffic.add(first, second, third)
    late = make_request(4, request_id="late", max_tokens=2)
    traffic.step()
    traffic.add(late)
    for request in (first, third):
        request.tensors_on(torch.device("cpu"), VOCAB_SIZE, (EOS,))
    schedule, _ = traffic.step()
    assert schedule.preempted == [third]
    assert third.tensors is None and first.tensors is not None, "what sampling keeps goes with the blocks"
    assert [item.request for item in schedule.scheduled] == [first, second]
    assert list(traffic.scheduler.waiting) == [third, late]
    assert third.num_computed_tokens == 0 and third.num_preemptions == 1 and third.output_token_ids == [1]
    while not first.is_finished:
        schedule, _ = traffic.step()
        assert late.status is RequestStatus.WAITING, "it would fit, and it is not its turn"
    assert first.tensors is None
    schedule, committed = traffic.step()
    again = schedule.scheduled[0]
    assert (again.start, again.num_new_tokens, again.yields_token, again.is_decoding) == (0, 13, True, False)
    assert [gain.request for gain in committed] == [third, late], "it goes on where it was, with one token"
    assert len(third.output_token_ids) == 2


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    """The second request holds a block for rejected drafts, so that what it gives back would take it in again."""
    scheduler = make_scheduler(num_blocks=6)
    first, second = make_request(6, request_id="first", max_tokens=20), make_request(4, request_id="second")
    scheduler.add(first)
    scheduler.add(second)
    for counts, rows in (([], [[1], [1]]), ([4, 4], [[1] * 5, [1]]), ([0, 4], [[1], [1]])):
        schedule = scheduler.schedule()
        assert [item.request for item in schedule.scheduled] == [first, second]
        scheduler.commit(schedule, verdict(rows).read(drafts_of(counts)))
    schedule = scheduler.schedule()
    assert schedule.preempted == [second]
    assert [item.request for item in schedule.scheduled] == [first]


def test_a_request_goes_without_drafts_rather_than_preempt_a_neighbour() -> None:
    traffic = Traffic(scheduler=make_scheduler(num_blocks=4, num_speculative_tokens=4))
    traffic.add(*(make_request(6, request_id=str(i), max_tokens=9) for i in range(2)))
    traffic.step()
    schedule, _ = traffic.step()  # each has 7 tokens in two blocks: room for its last one, not for four drafts
    assert [item.max_draft_tokens for item in schedule.scheduled] == [0, 0]
    assert not schedule.preempted


def test_a_neighbour_is_not_preempted_before_the_drafts_are_given_up() -> None:
    """One block is free: the first request drafts into it, the second goes without."""
    traffic = Traffic(scheduler=make_scheduler(num_blocks=5, num_speculative_tokens=4))
    traffic.add(*(make_request(6, request_id=str(i), max_tokens=9) for i in range(2)))
    traffic.step()
    schedule, _ = traffic.step()
    assert [item.max_draft_tokens for item in schedule.scheduled] == [4, 0]
    assert not schedule.preempted


@given(
    max_tokens=st.integers(2, 12), num_prompt_tokens=st.integers(1, 20), room=st.integers(2, 12),
    num_speculative_tokens=st.integers(0, 10),
)  # fmt: skip
def test_drafts_end_one_short_of_the_last_token_that_can_be_committed(
    max_tokens: int, num_prompt_tokens: int, room: int, num_speculative_tokens: int
) -> None:
    """The step's last token is the target's own, so max_tokens - 1 drafts fill a request up, as max_model_len does."""
    scheduler = make_scheduler(
        max_model_len=num_prompt_tokens + room, num_speculative_tokens=num_speculative_tokens, block_size=1
    )
    traffic = Traffic(scheduler=scheduler)
    request = make_request(num_prompt_tokens, max_tokens=max_tokens)
    traffic.add(request)
    traffic.step()
    while not request.is_finished:
        left = min(max_tokens, room) - len(request.output_token_ids)
        (item,) = traffic.step()[0].scheduled
        assert item.max_draft_tokens == min(num_speculative_tokens, left - 1)
    assert len(request.output_token_ids) == min(max_tokens, room)
    assert request.finish_reason == "length"


def test_drafts_take_part_in_the_token_budget() -> None:
    traffic = Traffic(scheduler=make_scheduler(max_num_batched_tokens=8, num_speculative_tokens=4))
    traffic.add(*(make_request(2, request_id=str(i), max_tokens=9) for i in range(3)))
    traffic.step()
    schedule, _ = traffic.step()
    assert [item.num_reserved_tokens for item in schedule.scheduled] == [5, 3], "the third has to wait"


def test_a_prompt_is_computed_in_chunks_that_take_turns_with_those_that_decode() -> None:
    traffic = Traffic(scheduler=make_scheduler(max_num_batched_tokens=10, num_speculative_tokens=0))
    traffic.add(make_request(3, request_id="short", max_tokens=20), make_request(24, request_id="long", max_tokens=4))
    parts = [[item.num_new_tokens for item in traffic.step()[0].scheduled] for _ in range(7)]
    assert parts == [[3, 7], [1], [10], [1], [7], [1, 1], [1, 1]]


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    traffic = Traffic(
        scheduler=make_scheduler(max_num_batched_tokens=24, enable_chunked_prefill=False, num_speculative_tokens=0)
    )
    traffic.add(make_request(3, request_id="short", max_tokens=3), make_request(24, request_id="long", max_tokens=4))
    parts = [[item.num_new_tokens for item in traffic.step()[0].scheduled] for _ in range(5)]
    assert parts == [[3], [1], [24], [1, 1], [1]]


# (accepted drafts and the token behind them, max_tokens) -> (kept tokens, accepted, why it ends)
COMMITS: dict[str, tuple[list[int], int, int, int, str | None]] = {
    "nothing accepted": ([5], 9, 1, 0, None),
    "some accepted": ([5, 6, 7], 9, 3, 2, None),
    "all accepted": ([5, 6, 7, 8, 9], 9, 5, 4, None),
    "eos inside the accepted run": ([5, EOS, 7, 8, 9], 9, 2, 2, "stop"),
    "eos is the last accepted draft": ([5, 6, 7, EOS, 9], 9, 4, 4, "stop"),
    "eos behind the accepted run": ([5, 6, EOS], 9, 3, 2, "stop"),
    "eos alone": ([EOS], 9, 1, 0, "stop"),
    "max_tokens inside the accepted run": ([5, 6, 7, 8, 9], 4, 3, 3, "length"),
    "max_tokens behind the accepted run": ([5, 6, 7], 4, 3, 2, "length"),
    "eos before max_tokens": ([5, EOS, 7, 8, 9], 3, 2, 2, "stop"),
}


@pytest.mark.parametrize("case", COMMITS)
def test_commit_counts_what_stays(case: str) -> None:
    row, max_tokens, num_kept, num_accepted, finish_reason = COMMITS[case]
    scheduler = make_scheduler(num_speculative_tokens=4)
    request = make_request(6, max_tokens=max_tokens)
    scheduler.add(request)
    scheduler.commit(scheduler.schedule(), verdict([[3]]).read(DraftTokens.empty(0)))
    (gain,) = scheduler.commit(scheduler.schedule(), verdict([row]).read(drafts_of([4])))
    assert gain.token_ids == row[:num_kept]
    assert (gain.num_draft_tokens, gain.num_accepted_tokens) == (4, num_accepted)
    assert request.output_token_ids == [3, *row[:num_kept]]
    assert request.num_computed_tokens == request.num_tokens - 1, "what was rejected is not counted as cached"
    assert request.finish_reason == finish_reason
    assert request.is_finished == (finish_reason is not None)
    scheduler.blocks.check_integrity([request.block_table])
    assert bool(request.block_table) == (finish_reason is None)


def test_a_step_of_chunks_alone_commits_no_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request(10)
    scheduler.add(request)
    assert scheduler.commit(scheduler.schedule(), verdict([]).read(DraftTokens.empty(0))) == []
    assert (request.num_computed_tokens, request.output_token_ids) == (4, [])


REFUSALS: dict[str, tuple[Request, str]] = {
    "empty": (make_request(0), "at least one token"),
    "as long as the context": (make_request(64, max_tokens=1), r"shorter than max_model_len \(64 tokens\), got 64"),
    "too many for the cache": (make_request(20, max_tokens=21), r"\(40 tokens\), got 41; lower max_tokens"),
    "a prompt too long for the cache": (make_request(45, max_tokens=1), r"\(40 tokens\), got 46; shorten the prompt"),
    "a token behind the vocabulary": (
        Request(request_id="0", prompt_token_ids=[1, 32], sampling_params=SamplingParams(), seed=0),
        r"prompt_token_ids must lie in \[0, 31\], the vocabulary, got 32; use",
    ),
    "a negative token": (
        Request(request_id="0", prompt_token_ids=[-1], sampling_params=SamplingParams(), seed=0),
        r"prompt_token_ids must lie in \[0, 31\], the vocabulary, got -1; use",
    ),
    "a bias for no token": (make_request(3, logit_bias={32: 1.0}), r"logit_bias must name tokens in \[0, 31\].*got 32"),
    "an allowed token that is none": (
        make_request(3, allowed_token_ids=[1, 40]),
        "allowed_token_ids must name.*got 40",
    ),
    "nothing allowed but eos, which is not yet": (
        make_request(3, allowed_token_ids=[EOS, 7], stop_token_ids=[7], min_tokens=1),
        r"allowed_token_ids must hold a token that bad_words and min_tokens leave, got \[0, 7\]; allow more",
    ),
    "nothing to say behind a token": (
        replace(make_request(3, allowed_token_ids=[1, 2], bad_words="x"), bad_words_token_ids=((1, 1), (1, 2))),
        r"leave behind the output \[1\], got \[1, 2\]; allow more",
    ),
    "a stop token that is none": (make_request(3, stop_token_ids=[99]), "stop_token_ids must name tokens.*got 99"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_can_never_run_is_refused_with_the_reason(case: str) -> None:
    request, reason = REFUSALS[case]
    refusal = make_scheduler(num_blocks=10, max_model_len=64).refusal(request)
    assert refusal is not None and re.search(reason, refusal)


def test_what_just_fits_runs_to_its_end() -> None:
    """41 tokens would not: the last one sampled needs no room, but the rule counts whole requests."""
    for request in (make_request(20, max_tokens=20), make_request(39, max_tokens=99), make_request(1, max_tokens=39)):
        traffic = Traffic(scheduler=make_scheduler(num_blocks=10, max_model_len=40))
        traffic.add(request)
        traffic.finish()
        assert request.num_tokens == 40


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_gives_the_blocks_back_whatever_the_request_was_doing(num_steps: int) -> None:
    """Waiting, in the middle of its prompt, decoding, or preempted."""
    traffic = Traffic(scheduler=make_scheduler(num_blocks=12, max_num_batched_tokens=24))
    requests = [make_request(20, request_id=str(i), max_tokens=8) for i in range(3)]
    traffic.add(*requests)
    for _ in range(num_steps):
        traffic.step()
    for request in requests:
        if not request.is_finished:
            traffic.scheduler.abort(request)
            assert request.status is RequestStatus.FAILED and request.finish_reason == "error"
            assert request.block_table == []
            traffic.check_order_and_blocks()
    assert not traffic.scheduler.has_unfinished
    assert traffic.scheduler.blocks.num_free_blocks == 12


def test_the_last_token_is_the_outputs_and_before_it_the_prompts() -> None:
    request = make_request(3)
    assert request.last_token_id == request.prompt_token_ids[-1]
    request.output_token_ids += [7, 9]
    assert request.last_token_id == 9
