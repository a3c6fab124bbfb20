"""The scheduler alone, over prompts that begin alike: what is in a block, for target and drafter, and who waits for it.

A stand-in for both caches notes in every slot which text made it; every request must find its own there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engine import prefix_cache
from runner.engine.prefix_cache import prefix_keys
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.prompts import make_requests
from runner.tokenizer import Tokenizer
from tests.test_scheduler import EOS, Traffic, make_scheduler, shapes


def follows(request: Request) -> bool:
    """As a drafter with KV of its own says."""
    params = request.sampling_params
    return not request.is_finished and params.max_draft_tokens != 0 and params.max_tokens > 1


def always(request: Request) -> bool:
    return True


def request_of(prompt: Sequence[int], request_id: str, **params: Any) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=list(prompt), sampling_params=SamplingParams(**params), seed=0
    )


@dataclass(kw_only=True)
class CachedTraffic(Traffic):
    """Keeps what target and head have written, a digest of the text in every slot."""

    keeps_order: bool = False
    has_head: bool = False  # `follows` says whose prompts are shared
    target: dict[int, int] = field(default_factory=dict)  # slot -> text up to its token
    head: dict[int, int] = field(default_factory=dict)  # slot -> text up to the token behind it
    followed: dict[str, int] = field(default_factory=dict)  # request_id -> first token whose row the head lacks
    tables: dict[str, list[int]] = field(default_factory=dict)

    def slots(self, request: Request, table: list[int]) -> list[int]:
        size = self.scheduler.blocks.block_size
        return [block * size + place for block in table for place in range(size)]

    def texts(self, request: Request) -> list[int]:
        digests, before = [], 0
        for token in [*request.prompt_token_ids, *request.output_token_ids]:
            before = hash((before, token))
            digests.append(before)
        return digests

    def _check_schedule(self, schedule: Schedule, unfinished: list[Request], was_running: list[Request]) -> None:
        super()._check_schedule(schedule, unfinished, was_running)
        for request in schedule.preempted:
            self.followed.pop(request.request_id, None)
        for item in schedule.scheduled:
            request = item.request
            self.tables[request.request_id] = list(request.block_table)
            slots, texts = self.slots(request, request.block_table), self.texts(request)
            for place in range(item.start):
                assert self.target[slots[place]] == texts[place], "a token whose KV is not there, or another one's"
            if item.is_decoding and self.has_head and follows(request):
                for place in range(1, min(item.start, self.followed[request.request_id])):
                    assert self.head[slots[place - 1]] == texts[place], "a row of the head's that is not there"

    def computed(self, schedule: Schedule) -> None:
        for item in schedule.scheduled:
            request = item.request
            slots, texts = self.slots(request, self.tables[request.request_id]), self.texts(request)
            for place in range(item.start, request.num_computed_tokens):
                self.target[slots[place]] = texts[place]
            if follows(request):
                first = self.followed.get(request.request_id, item.start + 1)
                for place in range(first, request.num_computed_tokens):
                    self.head[slots[place - 1]] = texts[place]
                self.followed[request.request_id] = max(first, request.num_computed_tokens)


@settings(max_examples=150)
@given(shape=shapes(), seed=st.integers(0, 2**16))
def test_in_any_traffic_every_request_finds_what_it_would_have_computed(shape: dict[str, Any], seed: int) -> None:
    generator = random.Random(seed)
    traffic = CachedTraffic(
        scheduler=make_scheduler(**shape, fills_blocks=follows),
        generator=generator,
        tokens=[1, 2, EOS],
        has_head=True,
    )
    scheduler, longest = traffic.scheduler, shape["max_model_len"] - 1
    for event in range(40):
        if generator.random() < 0.5:
            # Of two tokens in runs, so that many begin alike; now and then the very prompt of an earlier one.
            prompt = [1] * generator.randint(1, longest)
            if (first := generator.randint(0, longest)) < len(prompt):
                prompt[first:] = [2] * (len(prompt) - first)
            asked = {"max_tokens": generator.randint(1, 20), "ignore_eos": generator.random() < 0.5}
            if generator.random() < 0.2:
                asked["speculative_sampling"] = False
            if generator.random() < 0.1:
                asked["prompt_logprobs"] = 0
            traffic.add(request_of(prompt, str(event), **asked))
        elif in_line := [*scheduler.running, *scheduler.waiting]:
            if generator.random() < 0.1:
                leaves = generator.choice(in_line)
                scheduler.abort(leaves)
                traffic.followed.pop(leaves.request_id, None)
                traffic.check_order_and_blocks()
            else:
                traffic.step()
    traffic.finish()
    for request in traffic.requests:
        if request.num_cached_tokens is not None:
            assert request.num_cached_tokens % shape["block_size"] == 0
            assert request.num_cached_tokens < request.num_prompt_tokens
            assert request.sampling_params.prompt_logprobs is None


def started(schedule: Schedule) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_new_tokens) for item in schedule.scheduled]


def test_a_prompt_waits_for_the_one_that_computes_its_beginning_and_others_pass_it() -> None:
    traffic = CachedTraffic(scheduler=make_scheduler(fills_blocks=always, num_speculative_tokens=0))
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    traffic.add(
        request_of([*shared, 20, 21], "a"),
        request_of([*shared, 22], "b"),
        request_of([9, 9, 9, 9, 9, 9], "c"),
        request_of([*shared, 23], "d"),
    )
    assert started(traffic.step()[0]) == [("a", 0, 11), ("c", 0, 6)]
    assert [request.request_id for request in traffic.scheduler.waiting] == ["b", "d"]
    traffic.step()  # the others decode
    assert started(traffic.step()[0]) == [("b", 8, 2), ("d", 8, 2)]
    assert [request.num_cached_tokens for request in traffic.requests] == [0, 8, 0, 8]


def test_a_prompt_waits_through_the_chunks_that_it_shares_and_no_longer() -> None:
    scheduler = make_scheduler(fills_blocks=always, max_num_batched_tokens=10, num_speculative_tokens=0)
    traffic = CachedTraffic(scheduler=scheduler)
    long = [1, 2, 3, 4] * 7
    traffic.add(request_of(long, "long"), request_of([*long[:17], 9, 9, 9], "short"))
    assert started(traffic.step()[0]) == [("long", 0, 10)]
    assert started(traffic.step()[0]) == [("long", 10, 10)]
    schedule, _ = traffic.step()
    assert started(schedule) == [("long", 20, 8), ("short", 16, 2)]


def test_who_is_passed_over_keeps_its_room() -> None:
    """Sixteen blocks of four: the first has five in the end, the second shares three and lacks nine, the third nine."""
    scheduler = make_scheduler(num_blocks=16, fills_blocks=always, num_speculative_tokens=0)
    traffic = CachedTraffic(scheduler=scheduler, tokens=[5])
    shared = [1, 2, 3, 4] * 3
    traffic.add(
        request_of([*shared, 7, 8], "first", max_tokens=5),
        request_of([*shared, 7, *[9] * 33], "second", max_tokens=2),
        request_of([2] * 34, "third", max_tokens=2),
    )
    assert started(traffic.step()[0]) == [("first", 0, 14)], "the third would leave no room for the second"
    traffic.step()  # the first decodes
    assert started(traffic.step()[0]) == [("second", 12, 34)]
    traffic.finish()


def test_no_more_are_passed_over_than_could_run() -> None:
    scheduler = make_scheduler(fills_blocks=always, max_num_seqs=3, num_speculative_tokens=0)
    traffic = CachedTraffic(scheduler=scheduler)
    traffic.add(*(request_of([1] * 9, str(i)) for i in range(5)), request_of([2] * 9, "other"))
    assert started(traffic.step()[0]) == [("0", 0, 9)]
    assert started(traffic.step()[0]) == [("0", 9, 1)]
    assert started(traffic.step()[0]) == [("1", 8, 1), ("2", 8, 1)]


def test_nobody_waits_for_blocks_that_will_not_be_shared() -> None:
    traffic = CachedTraffic(scheduler=make_scheduler(fills_blocks=follows))
    traffic.add(request_of([1] * 9, "not followed", speculative_sampling=False), request_of([1] * 9, "followed"))
    assert started(traffic.step()[0]) == [("not followed", 0, 9), ("followed", 0, 9)]


def test_prompt_logprobs_wait_for_nobody_and_compute_every_token() -> None:
    traffic = CachedTraffic(scheduler=make_scheduler(fills_blocks=always))
    traffic.add(request_of([1] * 9, "first"), request_of([1] * 9, "logprobs", prompt_logprobs=1))
    assert started(traffic.step()[0]) == [("first", 0, 9), ("logprobs", 0, 9)]


def test_sharing_makes_room_where_two_prompts_would_not_fit() -> None:
    """Seven blocks of four: the first holds four, the second would need four and shares three."""
    traffic = CachedTraffic(
        scheduler=make_scheduler(num_blocks=7, fills_blocks=always, num_speculative_tokens=0), tokens=[5]
    )
    shared = [1, 2, 3, 4] * 3
    traffic.add(request_of([*shared, 7, 8], "first", max_tokens=9))
    traffic.step()
    traffic.add(request_of([*shared, 7, 9, 9, 9], "second", max_tokens=2))
    traffic.step()  # the first decodes
    assert started(traffic.step()[0]) == [("second", 12, 4)]
    assert len({block for request in traffic.requests for block in request.block_table}) <= 7


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_blocks_that_nobody_has_count_as_free_but_not_for_the_one_that_shares_them(num_blocks: int) -> None:
    """A prompt that needs all blocks, three of them found: it must not count these twice."""
    scheduler = make_scheduler(num_blocks=num_blocks, fills_blocks=always, num_speculative_tokens=0)
    traffic = CachedTraffic(scheduler=scheduler, tokens=[5])
    shared = [1, 2, 3, 4] * 3
    traffic.add(request_of([*shared, 7], "first", max_tokens=1))
    traffic.finish()
    assert scheduler.blocks.num_free_blocks == num_blocks
    traffic.add(request_of([2] * 2, "beside", max_tokens=3))
    traffic.step()  # holds one block
    traffic.add(request_of([*shared, 7, 8], "second", max_tokens=2))
    assert started(traffic.step()[0]) == [("beside", 2, 1)]
    assert started(traffic.step()[0]) == [("second", 12, 2) if num_blocks == 5 else ("beside", 3, 1)]
    traffic.finish()


def test_without_chunks_the_budget_is_asked_for_what_is_left_to_compute() -> None:
    scheduler = make_scheduler(
        fills_blocks=always, max_num_batched_tokens=20, enable_chunked_prefill=False, num_speculative_tokens=0
    )
    traffic = CachedTraffic(scheduler=scheduler)
    traffic.add(request_of([1] * 17, "first", max_tokens=1), request_of([1] * 17, "second", max_tokens=1))
    traffic.add(request_of([1] * 17, "third", max_tokens=1))
    assert started(traffic.step()[0]) == [("first", 0, 17)]
    assert started(traffic.step()[0]) == [("second", 16, 1), ("third", 16, 1)]


def test_siblings_have_the_keys_of_their_prompt_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    def noting(prompt: list[int], block_size: int) -> list[bytes]:
        made.append(prompt)
        return prefix_keys(prompt, block_size)

    monkeypatch.setattr(prefix_cache, "prefix_keys", noting)
    prompts, scheduler = [[1] * 9, [2] * 9], make_scheduler(fills_blocks=always)
    requests = make_requests(prompts, [SamplingParams(n=3)] * 2, Tokenizer(None), 0)
    for request in requests:
        scheduler.add(request)
        assert request.prefix_keys == prefix_keys(request.prompt_token_ids, scheduler.blocks.block_size)
    assert len(requests) == 6 and made == prompts


def test_without_prefix_caching_nobody_waits_and_nothing_is_kept() -> None:
    traffic = CachedTraffic(scheduler=make_scheduler())
    traffic.add(request_of([1] * 9, "0", max_tokens=1), request_of([1] * 9, "1", max_tokens=1))
    assert started(traffic.step()[0]) == [("0", 0, 9), ("1", 0, 9)]
    traffic.add(request_of([1] * 9, "2", max_tokens=1))
    assert started(traffic.step()[0]) == [("2", 0, 9)]
