"""Prompts that begin alike are computed once, and nobody can tell by the answers, the drafts or the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proposers import available_methods
from runner.engine.block_manager import BlockManager
from runner.engine.prefix_cache import prefix_keys
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.llm import LLM
from runner.metrics import MetricsCollector
from runner.outputs import RequestOutput
from runner.prompts import make_requests
from runner.step_loop import StepLoop
from runner.trace import RequestTraces
from tests.conftest import Engines
from tests.heads_for_tests import PARD2
from tests.proposers_for_tests import RaggedProposer
from tests.test_losslessness import METHOD_KEYS

BLOCK_SIZE = 16
METHODS = available_methods()


def prompt(*parts: tuple[int, int]) -> list[int]:
    """Tokens of several (number, seed)."""
    return [(seed * 11 + 7 * i + i * i // 5) % 61 + 3 for number, seed in parts for i in range(number)]


# --- what blocks are known by ---------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 2), max_size=14)


@given(first=texts, second=texts, block_size=st.integers(1, 4))
def test_two_blocks_have_one_key_where_all_up_to_the_next_token_is_the_same(
    first: list[int], second: list[int], block_size: int
) -> None:
    ours, theirs = prefix_keys(first, block_size), prefix_keys(second, block_size)
    assert len(ours) == max(0, len(first) - 1) // block_size, "the last token is always left to compute"
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        behind = (place + 1) * block_size + 1
        assert (one == other) == (first[:behind] == second[:behind])
    assert len(set(ours)) == len(ours)


def test_tokens_of_any_vocabulary_have_keys() -> None:
    assert prefix_keys([2**31, 2**40, 7], 2) != prefix_keys([2**31, 2**40 + 1, 7], 2)


# --- whose the blocks are -------------------------------------------------------------------------------------------

events = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3), st.integers(0, 5)),  # a table, and which text it is of
    st.tuples(st.just("grow"), st.integers(0, 3), st.integers(1, 3)),  # by so many blocks
    st.tuples(st.just("keep"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("forget"), st.just(0), st.just(0)),
)
# Some of these texts begin alike; a text's first n blocks hold what the keys up to there say.
KEYS = [[f"{text >> (2 - depth if depth < 3 else 0)}/{depth}".encode() for depth in range(5)] for text in range(6)]


@given(num_blocks=st.integers(2, 12), happened=st.lists(events, max_size=60))
def test_a_block_that_is_found_holds_what_its_key_says(num_blocks: int, happened: list[tuple[str, int, int]]) -> None:
    manager = BlockManager(num_blocks, 1)
    tables: list[list[int]] = [[] for _ in range(4)]
    text_of, contents = [0] * 4, dict[int, bytes]()
    for what, place, number in happened:
        table, keys = tables[place], KEYS[text_of[place]]
        if what == "begin" and not table:
            text_of[place] = number
            found = manager.find(KEYS[number])
            assert [contents[block] for block in found] == KEYS[number][: len(found)]
            num_free, num_unowned = manager.num_free_blocks, manager.num_unowned(found)
            manager.share(found, table)
            assert manager.num_free_blocks == num_free - num_unowned
        elif what == "grow":
            before = list(table)
            if manager.grow(table, len(table) + number):
                taken = table[len(before) :]
                assert not {block for other in tables if other is not table for block in other} & set(taken)
                contents.update(zip(taken, [*keys, *[b"output"] * 99][len(before) :], strict=False))
        elif what == "keep":
            complete = min(len(table), len(keys))
            manager.keep(keys[:complete], table[:complete])
            assert len(manager.find(keys)) >= complete
        elif what == "release":
            manager.release(table)
        elif what == "forget":
            manager.forget()
            assert not any(manager.find(keys) for keys in KEYS)
        manager.check_integrity(tables)
    for table in tables:
        manager.release(table)
    assert manager.num_free_blocks == manager.num_usable_blocks


def test_what_was_let_go_of_first_is_overwritten_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    manager = BlockManager(6, 1)
    first, second, third = list[int](), list[int](), list[int]()
    for table, keys in ((first, [b"a", b"ab"]), (second, [b"x", b"xy"])):
        assert manager.grow(table, 2)
        manager.keep(keys, table)
        manager.release(table)
    assert manager.num_free_blocks == 5
    for num_blocks, known in ((1, 4), (2, 3), (3, 2), (4, 1), (5, 0)):
        assert manager.grow(third, num_blocks)
        found = len(manager.find([b"a", b"ab"])) + len(manager.find([b"x", b"xy"]))
        assert found == known
        assert bool(manager.find([b"a"])) == (num_blocks < 3) and bool(manager.find([b"x"])) == (num_blocks < 5)


def test_what_is_found_again_counts_as_used_last() -> None:
    manager = BlockManager(3, 1)
    tables = [list[int](), list[int]()]
    for table, key in zip(tables, (b"old", b"new"), strict=True):
        assert manager.grow(table, 1)
        manager.keep([key], table)
        manager.release(table)
    again = list[int]()
    manager.share(manager.find([b"old"]), again)
    manager.release(again)
    assert manager.grow(again, 1)
    assert manager.find([b"old"]) and not manager.find([b"new"])


# --- whole runs -----------------------------------------------------------------------------------------------------

SHARED = 3 * BLOCK_SIZE + 5
# (prompt, how many of its tokens the ones before it leave in the cache)
TALKS: list[tuple[list[int], int]] = [
    (prompt((SHARED, 1), (9, 2)), 0),
    (prompt((SHARED, 1), (9, 2)), 3 * BLOCK_SIZE),  # the very same
    (prompt((SHARED, 1), (30, 3)), 3 * BLOCK_SIZE),
    (prompt((SHARED, 1), (30, 3), (20, 4)), 5 * BLOCK_SIZE),  # begins with the one before it
    (prompt((2 * BLOCK_SIZE + 1, 1), (12, 5)), 2 * BLOCK_SIZE),
    (prompt((2 * BLOCK_SIZE, 1), (12, 6)), BLOCK_SIZE),  # another token behind the second block
    (prompt((2 * BLOCK_SIZE, 1)), BLOCK_SIZE),  # nothing behind it
    (prompt((1, 7), (SHARED, 1)), 0),
    (prompt((BLOCK_SIZE, 8)), 0),
]
SAMPLED = SamplingParams(temperature=0.8, max_tokens=12, seed=5, ignore_eos=True)


def steps_of(llm: LLM) -> dict[str, tuple[Any, ...]]:
    """What each request of the last generate() drafted and accepted, step by step."""
    return {
        record.request_id: (record.tokens_per_step, record.num_draft_tokens, record.num_accepted_tokens)
        for record in llm.metrics.records
    }


def say(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[RequestOutput], Any]:
    llm.engine.proposer.restart()  # or suffix would know the answers
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params)
    llm.engine.block_manager.check_integrity([])
    return outputs, steps_of(llm)


TREES: dict[str, dict[str, Any]] = {
    "eagle3, tree": {"method": "eagle3", "speculative_token_tree": "dynamic"},
    "dflash, tree": {"method": "dflash", "speculative_token_tree": "dynamic"},
    "medusa, tree": {"method": "medusa", "speculative_token_tree": "dynamic"},
}
JUDGED: dict[str, dict[str, Any]] = {
    f"{method}, probabilistic": {"method": method, "rejection_sample_method": "probabilistic"}
    for method in ("draft_model", "eagle", "pard")
}
DRAFTERS: dict[str, dict[str, Any]] = {
    **{method: {"method": method, **METHOD_KEYS.get(method, {})} for method in METHODS}, **TREES, **JUDGED
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_behind_a_prefix_that_was_found_all_is_said_and_drafted_as_behind_one_that_was_computed(
    engines: Engines, name: str
) -> None:
    config = {"num_speculative_tokens": 4, **DRAFTERS[name]} if name != "none" else None
    llm = engines(config, max_num_seqs=1, max_num_batched_tokens=50)
    prompts = [talk for talk, _ in TALKS]
    alone = []
    for talk in prompts:
        llm.reset_prefix_cache()
        (output,), steps = say(llm, [talk], SAMPLED)
        assert output.num_cached_tokens == 0
        alone.append((output.outputs[0].token_ids, *steps.values()))
    llm.reset_prefix_cache()
    found = list[int | None]()
    for talk, expected in zip(prompts, alone, strict=True):
        (output,), steps = say(llm, [talk], SAMPLED)
        assert (output.outputs[0].token_ids, *steps.values()) == expected
        found.append(output.num_cached_tokens)
    assert found == [number for _, number in TALKS]


class Caches:
    """Runs requests and reads what is in the cache for their prompts, the target's and the drafter's, as they end."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def of(self, prompts: Sequence[list[int]]) -> list[list[torch.Tensor]]:
        """Of each prompt one after another, per model [num_prompt_tokens - 1, bytes of all layers]."""
        engine = self.llm.engine
        scheduler = self.llm.scheduler_for(engine.proposer)
        loop = StepLoop(engine, scheduler, engine.proposer, MetricsCollector(), RequestTraces(lambda *_: "", {}))
        read = []
        asked = [{"prompt_token_ids": each} for each in prompts]
        for request in make_requests(asked, [SAMPLED] * len(prompts), engine.tokenizer, 0):
            scheduler.add(request)
            while len(request.output_token_ids) < 4:
                loop.step()
            read.append(self._read(request))
            scheduler.abort(request)
            engine.proposer.release(request.request_id)
        return read

    def _read(self, request: Request) -> list[torch.Tensor]:
        block_size = self.llm.engine.block_manager.block_size
        places = torch.arange(request.num_prompt_tokens - 1)  # a head's row of the first output token is the next one
        slots = torch.tensor(request.block_table)[places // block_size] * block_size + places % block_size
        runners: list[Any] = [self.llm.engine.target, getattr(self.llm.engine.proposer, "runner", None)]
        caches = [runner.cache for runner in runners if runner is not None]
        return [torch.cat([layer.flatten(0, 1)[slots] for layer in cache.layers], dim=1) for cache in caches]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["draft_model", "pard", "pard2", "eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_a_prefix_that_was_found_has_the_bits_of_one_that_was_computed(
    engines: Engines, method: str, dtype: str
) -> None:
    llm = engines(
        {"method": method.removesuffix("2"), "num_speculative_tokens": 4},
        of_drafters=PARD2 if method == "pard2" else None,
        dtype=dtype,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    caches, prompts = Caches(llm), [talk for talk, _ in TALKS]
    computed = []
    for talk in prompts:
        llm.reset_prefix_cache()
        computed += caches.of([talk])
    llm.reset_prefix_cache()
    for number, (ours, theirs) in enumerate(zip(caches.of(prompts), computed, strict=True)):
        assert len(ours) == 2
        for found, alone in zip(ours, theirs, strict=True):
            assert torch.equal(found, alone), f"prompt {number}"


@pytest.mark.parametrize("method", ["draft_model", "pard"])
def test_a_draft_model_computes_no_token_of_a_prefix_that_was_found(
    engines: Engines, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines({"method": method, "num_speculative_tokens": 2})
    llm.reset_prefix_cache()
    runner = llm.engine.proposer.runner  # type: ignore[attr-defined]
    run, starts = runner.run, list[int]()
    monkeypatch.setattr(
        runner, "run", lambda parts, *args: (starts.extend(part.start for part in parts), run(parts, *args))[1]
    )
    talk = {"prompt_token_ids": prompt((40, 19))}
    for expected in (0, 32):
        starts.clear()
        llm.generate([talk], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        assert min(starts) == expected


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "eagle3"])
def test_n_completions_compute_their_prompt_once(engines: Engines, method: str) -> None:
    config = None if method == "none" else {"method": method, "num_speculative_tokens": 3}
    llm = engines(config)
    asked = SamplingParams(temperature=0.9, n=4, max_tokens=6, seed=1, ignore_eos=True)
    talk = prompt((4 * BLOCK_SIZE + 3, 9))
    llm.reset_prefix_cache()
    (output,) = llm.generate([{"prompt_token_ids": talk}], asked)
    found = [record.num_cached_tokens for record in sorted(llm.metrics.records, key=lambda record: record.request_id)]
    assert found == [0, *[4 * BLOCK_SIZE] * 3]
    assert output.num_cached_tokens == 0
    assert len({completion.token_ids for completion in output.outputs}) == 4
    off = engines(config, enable_prefix_caching=False)
    (expected,) = off.generate([{"prompt_token_ids": talk}], asked)
    assert output.outputs == expected.outputs
    assert all(record.num_cached_tokens is None for record in off.metrics.records)


def test_requests_of_one_token_leave_their_prompt_to_the_next_where_the_drafter_has_no_cache(engines: Engines) -> None:
    """A draft model does not compute what it will never draft from, so its blocks would lack something."""
    talk, short = {"prompt_token_ids": prompt((40, 10))}, SamplingParams(temperature=0.0, max_tokens=1)
    for method, found in ((None, 32), ({"method": "ngram", "num_speculative_tokens": 2}, 32), ("draft_model", 0)):
        config = {"method": method, "num_speculative_tokens": 2} if isinstance(method, str) else method
        llm = engines(config)
        llm.reset_prefix_cache()
        llm.generate([talk], short)
        assert llm.generate([talk], short)[0].num_cached_tokens == found


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_requests_of_one_token_wait_for_nobody_who_leaves_them_nothing(engines: Engines, method: str) -> None:
    llm = engines({"method": method, "num_speculative_tokens": 2})
    talks = [{"prompt_token_ids": prompt((40, 21), (5, seed))} for seed in range(6)]
    llm.reset_prefix_cache()
    outputs = llm.generate(talks, SamplingParams(temperature=0.0, max_tokens=1))
    num_found = sum(output.num_cached_tokens > 0 for output in outputs)
    assert (len(llm.metrics.step_points), num_found) == ((2, 5) if method == "ngram" else (1, 0))


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "dflash", "ngram"])
def test_requests_that_end_with_their_first_token_do_not_wait_for_each_other_in_turn(
    engines: Engines, method: str
) -> None:
    """A drafter does not follow a request that has ended, so each left nothing to the next: 16 requests, 16 steps."""
    llm = engines({"method": method, "num_speculative_tokens": 4})
    llm.reset_prefix_cache()
    talks = [{"prompt_token_ids": prompt((SHARED, 30), (4, 31 + number))} for number in range(6)]
    ends = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=list(range(llm.engine.target.model.vocab_size)))
    found = llm.generate(talks, ends)
    assert len(llm.metrics.step_points) == 2
    assert all(len(output.outputs[0].token_ids) == 1 for output in found)
    goes_on = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.generate(talks[:1], goes_on)
    assert all(
        output.num_cached_tokens == SHARED // BLOCK_SIZE * BLOCK_SIZE for output in llm.generate(talks[1:], ends)
    )


def test_what_a_drafter_did_not_follow_is_not_found_by_those_that_it_follows(engines: Engines) -> None:
    llm = engines({"method": "draft_model", "num_speculative_tokens": 3})
    llm.reset_prefix_cache()
    talk = {"prompt_token_ids": prompt((40, 11))}
    drafted = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, speculative_sampling=False)
    found = [llm.generate([talk], params)[0].num_cached_tokens for params in (plain, plain, drafted, drafted, plain)]
    assert found == [0, 0, 0, 32, 32]


def test_a_proposer_that_reads_hidden_states_says_itself_whether_it_needs_those_of_every_token(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"method": "custom_class", "model": "tests.proposers_for_tests.RaggedProposer"}
    llm = engines({**config, "num_speculative_tokens": 2})
    monkeypatch.setattr(RaggedProposer, "tap_layers", (0,))
    talk, params = {"prompt_token_ids": prompt((40, 20))}, SamplingParams(temperature=0.0, max_tokens=2)
    for says, found in ((False, 0), (True, 32)):
        if says:
            monkeypatch.setattr(RaggedProposer, "fills_blocks", lambda self, request: True)
        llm.reset_prefix_cache()
        assert [llm.generate([talk], params)[0].num_cached_tokens for _ in range(2)] == [0, found]


def test_a_head_that_sees_shorter_texts_leaves_no_longer_prompt_to_them(engines: Engines) -> None:
    llm = engines({"method": "eagle3", "num_speculative_tokens": 3, "max_model_len": 60})
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    long, short = prompt((70, 12)), prompt((40, 12))
    found = [llm.generate([{"prompt_token_ids": talk}], params)[0].num_cached_tokens for talk in (long, short, long)]
    assert found == [0, 0, 32]


def test_another_proposer_finds_nothing_of_the_one_before(engines: Engines) -> None:
    """Plain decoding, the baseline of a run, leaves out what a draft model keeps in its blocks."""
    llm = engines({"method": "draft_model", "num_speculative_tokens": 3})
    talk, params = {"prompt_token_ids": prompt((40, 13))}, SamplingParams(temperature=0.0, max_tokens=4)
    llm.generate([talk], params)
    requests = make_requests([talk], [params], llm.engine.tokenizer, 0)
    llm.run(requests, llm.engine.plain_proposer, MetricsCollector())
    assert requests[0].num_cached_tokens == 0
    assert llm.generate([talk], params)[0].num_cached_tokens == 0
    assert llm.generate([talk], params)[0].num_cached_tokens == 32


def test_asking_what_would_be_refused_leaves_the_cache_alone(engines: Engines) -> None:
    llm = engines({"method": "draft_model", "num_speculative_tokens": 3})
    talk, params = {"prompt_token_ids": prompt((40, 22))}, SamplingParams(temperature=0.0, max_tokens=4)
    llm.generate([talk], params)
    assert llm.refusals(make_requests([talk], [params], llm.engine.tokenizer, 0)) == [None]
    assert llm.generate([talk], params)[0].num_cached_tokens == 32


@pytest.mark.parametrize("where", ["_take", "release", "share", "keep", "find"])
def test_an_interrupt_within_the_bookkeeping_loses_no_block(
    engines: Engines, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes between any two lines: here with the call's work half done, or all of it."""
    llm = engines(num_gpu_blocks_override=12)
    talks = [{"prompt_token_ids": prompt((40, 23 + seed % 2), (5, seed))} for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    expected = llm.generate(talks, params)
    blocks = llm.engine.block_manager
    call, num_calls = getattr(blocks, where), 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            if where == "release" and args[0]:
                call([args[0].pop()])
            raise KeyboardInterrupt
        return call(*args)

    llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(blocks, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(talks, params)
    blocks.check_integrity([])
    assert blocks.num_free_blocks == blocks.num_usable_blocks
    assert llm.generate(talks, params) == expected


def test_every_measured_pass_does_the_same_work(engines: Engines) -> None:
    llm = engines()
    talk, params = {"prompt_token_ids": prompt((40, 14))}, SamplingParams(temperature=0.0, max_tokens=4)
    for _ in range(2):
        requests = make_requests([talk], [params], llm.engine.tokenizer, 0)
        llm.run(requests, llm.engine.plain_proposer, MetricsCollector())
        assert requests[0].num_cached_tokens == 0


def test_prompt_logprobs_are_those_of_every_token_also_where_the_prompt_is_in_the_cache(engines: Engines) -> None:
    llm = engines()
    llm.reset_prefix_cache()
    talk = {"prompt_token_ids": prompt((40, 15))}
    asked = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    (first,) = llm.generate([talk], asked)
    (second,) = llm.generate([talk], asked)
    assert second.prompt_logprobs == first.prompt_logprobs
    assert second.prompt_logprobs is not None and len(second.prompt_logprobs) == 40
    assert second.num_cached_tokens is None
    (third,) = llm.generate([talk], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert third.num_cached_tokens == 32, "what it computed is there for others"
    assert third.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_request_that_was_preempted_finds_its_own_prompt(engines: Engines) -> None:
    llm = engines(num_gpu_blocks_override=9)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    talks = [{"prompt_token_ids": prompt((40, seed))} for seed in (16, 17)]
    requests = make_requests(talks, [params] * 2, llm.engine.tokenizer, 0)
    scheduler = llm.scheduler_for(llm.engine.proposer)
    loop = StepLoop(llm.engine, scheduler, llm.engine.proposer, MetricsCollector(), RequestTraces(lambda *_: "", {}))
    for request in requests:
        scheduler.add(request)
    while not requests[1].num_preemptions:
        loop.step()
    assert requests[1].num_computed_tokens == 0
    while not requests[1].num_computed_tokens:
        shared = llm.engine.block_manager.find(requests[1].prefix_keys)
        loop.step()
    assert shared and requests[1].block_table[: len(shared)] == shared
    while scheduler.has_unfinished:
        loop.step()
    assert requests[1].num_cached_tokens == 0, "of others it found nothing"
    for request in requests:
        llm.reset_prefix_cache()
        (alone,) = llm.generate([{"prompt_token_ids": request.prompt_token_ids}], params)
        assert request.output_token_ids == list(alone.outputs[0].token_ids)


def test_totals_of_the_prefix_cache_have_the_names_of_vllm(engines: Engines) -> None:
    llm = engines(max_num_seqs=2)
    before = {metric.name: metric for metric in llm.get_metrics()}
    llm.reset_prefix_cache()
    talk = {"prompt_token_ids": prompt((40, 18))}
    for _ in range(3):
        llm.generate([talk], SamplingParams(temperature=0.0, max_tokens=2))
    llm.generate([talk], SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0))  # does not ask
    with pytest.warns(UserWarning, match="max_model_len"):
        llm.generate([{"prompt_token_ids": prompt((300, 1))}], SamplingParams())  # never came that far
    after = {metric.name: metric for metric in llm.get_metrics()}
    names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
    assert [after[name].value - before[name].value for name in names] == [120, 64]  # type: ignore[union-attr]
