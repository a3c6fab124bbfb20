"""Suffix decoding's trees against their definition, a dictionary of all substrings, under random lives of requests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.cpu import compiled as compiled_room
from proposers.lookup.suffix_cache import SuffixCache, SuffixDraft
from proposers.lookup.suffix_forest import ID_MASK, MAX_NODES, NUM_PREFIXES, SEGMENT_SIZE, SEGMENTS, Forest
from proposers.lookup.suffix_reference import naive_propose, naive_substrings
from runner.engine.errors import UserError
from tests.suffix_dump import check_pool, dump_shared

TOKENS = st.lists(st.integers(0, 2), max_size=14)


def make_cache(max_tree_depth: int = 6, **keys: Any) -> SuffixCache:
    defaults = {"max_cached_requests": 100, "max_spec_factor": 1.0, "min_token_prob": 0.1}
    return SuffixCache(max_tree_depth=max_tree_depth, **{**defaults, **keys})


def array(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, dtype=np.int32)


def expected_tree(
    cache: SuffixCache, context: list[int], responses: list[list[int]], limit: int, *, drafts_trees: bool = True
) -> tuple[Fraction, int, list[int], list[int]]:
    return naive_propose(
        context,
        responses,
        limit=limit,
        max_depth=cache.max_tree_depth,
        max_spec_factor=Fraction(cache.max_spec_factor).limit_denominator(1000),
        min_token_prob=Fraction(cache.min_token_prob).limit_denominator(1000),
        drafts_trees=drafts_trees,
    )


def expected_draft(cache: SuffixCache, context: list[int], responses: list[list[int]], limit: int) -> SuffixDraft:
    score, length, tokens, _ = expected_tree(cache, context, responses, limit, drafts_trees=False)
    return SuffixDraft(tokens, float(score), length)


def assert_equal(found: SuffixDraft, expected: SuffixDraft) -> None:
    assert (found.token_ids, found.match_length) == (expected.token_ids, expected.match_length)
    assert found.score == pytest.approx(expected.score, rel=1e-6)


@settings(max_examples=200)
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("open"), TOKENS),
            st.tuples(st.just("append"), st.tuples(st.integers(0, 3), TOKENS)),
            st.tuples(st.just("finish"), st.integers(0, 3)),
            st.tuples(st.just("drop"), st.integers(0, 3)),
        ),
        max_size=14,
    ),
    max_depth=st.integers(1, 7),
    max_cached_requests=st.integers(0, 3),
    max_spec_factor=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    limit=st.integers(0, 6),
)
@example(  # the match leaves room for one token, and two are equally likely behind it
    events=[("open", [1, 0, 1, 1])],
    max_depth=2,
    max_cached_requests=0,
    max_spec_factor=3.0,
    min_token_prob=0.0,
    limit=2,
)
def test_whatever_requests_do_drafts_are_those_of_the_definition(
    events: list[tuple[str, Any]],
    max_depth: int,
    max_cached_requests: int,
    max_spec_factor: float,
    min_token_prob: float,
    limit: int,
) -> None:
    """Requests come, grow, finish and are dropped; matches kept from step to step, and one batch call for all."""
    cache = make_cache(
        max_depth,
        max_cached_requests=max_cached_requests,
        max_spec_factor=max_spec_factor,
        min_token_prob=min_token_prob,
    )
    running: dict[int, list[int]] = {}
    responses: list[list[int]] = []
    for kind, what in events:
        if kind == "open":
            row = cache.open()
            running[row] = list(what)
            cache.append(row, array(what))
        elif kind == "append" and running:
            row = sorted(running)[what[0] % len(running)]
            running[row] += what[1]
            cache.append(row, array(what[1]))
        elif kind in ("finish", "drop") and running:
            row = sorted(running)[what % len(running)]
            text = running.pop(row)
            cache.close(row)
            if kind == "finish":
                cache.insert(text)
                responses = [*responses, text] if text else responses
                responses = responses[max(0, len(responses) - max_cached_requests) :] if max_cached_requests else []
        rows = sorted(running)
        drafts = cache.step(rows, [[] for _ in rows], [limit] * len(rows))
        trees = cache.step_trees(rows, [[] for _ in rows], [limit] * len(rows))
        for row, draft, tree in zip(rows, drafts, trees, strict=True):
            expected = expected_draft(cache, running[row], responses, limit)
            assert draft == expected.token_ids
            _, _, tokens, parents = expected_tree(cache, running[row], responses, limit)
            assert tree == (tokens, parents)
            assert_equal(cache.propose(row, limit), expected)
        assert cache.num_responses == len(responses)
        check_pool(cache._forest, len(running))


@settings(max_examples=100)
@given(
    responses=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=16), min_size=1, max_size=8),
    max_depth=st.integers(1, 8),
    num_evicted=st.integers(0, 8),
)
def test_an_evicted_response_leaves_no_trace(responses: list[list[int]], max_depth: int, num_evicted: int) -> None:
    cache = make_cache(max_depth)
    for response in responses:
        cache.insert(response)
    for _ in range(min(num_evicted, len(responses))):
        cache.evict()
    cache._ring.tokens[: sum(map(len, responses[:num_evicted]))] = -1  # what comes next is written over it
    fresh = make_cache(max_depth)
    for response in responses[num_evicted:]:
        fresh.insert(response)
    assert dump_shared(cache) == dump_shared(fresh)
    substrings = naive_substrings(responses[num_evicted:], max_depth)
    for string, (count, heaviest) in dump_shared(cache).items():
        assert count == substrings.counts[string]
        expected = substrings.heaviest(string)
        assert heaviest is None or heaviest[: len(string) + 1] == expected


@settings(max_examples=60)
@given(text=st.lists(st.integers(0, 2), max_size=40), responses=st.lists(TOKENS, max_size=3), data=st.data())
def test_a_text_that_grows_is_matched_as_one_that_comes_whole(
    text: list[int], responses: list[list[int]], data: st.DataObject
) -> None:
    cache = make_cache()
    for response in responses:
        cache.insert(response)
    whole, growing = cache.open(), cache.open()
    cache.append(whole, array(text))
    while text:
        count = data.draw(st.integers(1, len(text)))
        cache.append(growing, array(text[:count]))
        text = text[count:]
    assert cache.propose(growing, 5) == cache.propose(whole, 5)


def test_a_large_forest_grows_shrinks_and_keeps_its_counts() -> None:
    """Several growths of nodes, hash and texts; hash slots that move back; families of many children."""
    generator = np.random.default_rng(7)
    texts = [generator.integers(0, 60, 90).tolist() for _ in range(80)]
    cache = make_cache(24, max_cached_requests=40)
    rows = [cache.open() for _ in range(40)]  # more than the first table of rows holds
    for row, text in zip(rows, texts[:40], strict=True):
        cache.append(row, array(text * 4))  # more than the first segment holds
    for text in texts:
        cache.insert(text)
    check_pool(cache._forest, len(rows))
    long = generator.integers(0, 500, 16_000).tolist()
    long += long[77:97]
    rows.append(cache.open())
    cache.append(rows[-1], array(long))
    assert cache._forest.nodes[0, SEGMENTS] > 1, "a segment of the hash has split"
    check_pool(cache._forest, len(rows))
    assert_equal(cache.propose(rows[-1], 8), expected_draft(cache, long, texts[40:], 8))
    fresh = make_cache(24)
    for text in texts[40:]:
        fresh.insert(text)
    assert dump_shared(cache) == dump_shared(fresh)
    for row, text in list(zip(rows, texts, strict=False))[:3]:
        assert_equal(cache.propose(row, 8), expected_draft(cache, text * 4, texts[40:], 8))
    for row in rows:
        cache.close(row)
    check_pool(cache._forest, 0)
    for _ in range(40):
        cache.evict()
    check_pool(cache._shared, 1)
    assert cache._shared.num_nodes == 1


def test_positions_may_wrap_around() -> None:
    """A server that runs for long passes 2**31 tokens; the order of what was seen must survive it."""
    cache, fresh = make_cache(max_cached_requests=3), make_cache(max_cached_requests=3)
    cache._ring._begin = cache._ring._end = 2**31 - 14
    generator = np.random.default_rng(3)
    for _ in range(12):
        response = generator.integers(0, 3, 9).tolist()
        cache.insert(response)
        fresh.insert(response)
        assert dump_shared(cache) == dump_shared(fresh)


@pytest.mark.parametrize("token", [0, 151_935, 2**31 - 1])
def test_tokens_may_be_as_large_as_an_int32(token: int) -> None:
    cache = make_cache()
    row = cache.open()
    cache.append(row, array([token, 5, token, 7, token, 5]))
    assert cache.propose(row, 1).token_ids == [token]
    cache.insert([5, token, token])
    assert cache.propose(row, 1).token_ids == [token]


def test_nothing_is_drafted_where_nothing_matches() -> None:
    cache = make_cache()
    empty, short = cache.open(), cache.open()
    cache.append(short, array([4]))
    assert cache.step([empty, short], [[], []], [3, 3]) == [[], []]
    assert cache.step([], [], []) == []
    assert make_cache(1).step([], [], []) == []


def test_limits_are_those_of_each_request() -> None:
    cache = make_cache()
    rows = [cache.open() for _ in range(3)]
    drafts = cache.step(rows, [[1, 2, 3, 4, 1, 2, 3]] * 3, [0, 1, 9])
    assert drafts == [[], [4], [4, 1, 2]]


def test_the_request_comes_before_others_and_the_longer_match_before_the_shorter() -> None:
    cache = make_cache(max_spec_factor=8.0)
    row = cache.open()
    cache.append(row, array([1, 2, 8, 8, 1, 2]))
    cache.insert([2, 9, 9, 2])  # 1/2 for both continuations of "2"
    assert cache.propose(row, 1) == SuffixDraft([8], 0.5, 2)
    cache.insert([3, 2, 9, 9])  # 2/3 now
    assert cache.propose(row, 1).token_ids == [9]


def test_among_equals_what_was_said_last_is_drafted_also_after_an_eviction() -> None:
    cache = make_cache()
    row = cache.open()
    cache.append(row, array([5]))
    for follower in (1, 2, 1, 3, 2):
        cache.insert([5, follower])
    assert cache.propose(row, 1).token_ids == [2]
    cache.insert([5, 1])
    assert cache.propose(row, 1).token_ids == [1]
    cache.evict()  # 1, 1, 2, 2, 3 are left; 1 was last
    assert cache.propose(row, 1).token_ids == [1]
    cache.evict()  # a 2
    cache.evict()  # a 1
    cache.insert([5, 2])
    assert cache.propose(row, 1).token_ids == [2]


def test_a_compiled_function_notices_that_one_it_calls_has_changed(tmp_path: Path) -> None:
    """numba's cache looks at the file of the function alone: the caller went on running yesterday's code."""
    package = tmp_path / "room"
    package.mkdir()
    (tmp_path / "other").mkdir()
    compiler = tmp_path / "other" / "compiled.py"
    shutil.copy(compiled_room.__file__, compiler)
    (package / "__init__.py").touch()
    start = "from other.compiled import compiled\n"
    (package / "lower.py").write_text(f"{start}@compiled\ndef one():\n    return 1\n")
    (package / "upper.py").write_text(
        f"{start}from room.lower import one\n@compiled\ndef two():\n    return one() + 1\n"
    )

    def run() -> str:
        command = [sys.executable, "-c", "from room.upper import two; print(two(), sum(two.stats.cache_hits.values()))"]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    assert [run(), run()] == ["2 0", "2 1"]
    (package / "lower.py").write_text(f"{start}@compiled\ndef one():\n    return 5\n")
    assert run() == "6 0"
    compiler.write_text(compiler.read_text() + "\n# other options\n")
    assert run() == "6 0", "how it is compiled counts too"


def test_a_full_cache_forgets_the_oldest_responses_and_skips_one_that_cannot_fit() -> None:
    """The cache raised an error in the middle of a step, and the run was lost."""
    cache, fresh = make_cache(), make_cache()
    cache._shared.capacity = 121
    responses = np.random.default_rng(5).integers(0, 9, (7, 20)).tolist()
    for response in [*responses, list(range(61))]:
        cache.insert(response)
    assert 1 < cache.num_responses < 7
    for response in responses[-cache.num_responses :]:
        fresh.insert(response)
    assert dump_shared(cache) == dump_shared(fresh)
    cache.insert(list(range(60)))
    assert cache.num_responses == 1, "the longest that fits"


def test_a_forest_refuses_more_nodes_than_its_hash_has_room_for() -> None:
    """A full segment has no empty slot, and a search in it would go round for ever."""
    assert MAX_NODES < NUM_PREFIXES * SEGMENT_SIZE * 0.9 and MAX_NODES < ID_MASK
    with pytest.raises(UserError, match=r"at most 114,[0-9,]+ tree nodes .* lower hardware.max_num_seqs"):
        Forest().reserve(MAX_NODES)
