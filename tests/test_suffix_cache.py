"""Suffix decoding's trees against their definition, a dictionary of all substrings, under random lives of requests."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proposers.lookup.suffix_cache import SuffixCache, SuffixDraft
from tests.suffix_reference import check_pool, dump_shared, naive_propose, naive_substrings

TOKENS = st.lists(st.integers(0, 2), max_size=14)


def make_cache(max_tree_depth: int = 6, **keys: Any) -> SuffixCache:
    defaults = {"max_cached_requests": 100, "max_spec_factor": 1.0, "min_token_prob": 0.1}
    return SuffixCache(max_tree_depth=max_tree_depth, **{**defaults, **keys})


def array(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(tokens, dtype=np.int32)


def expected_draft(cache: SuffixCache, context: list[int], responses: list[list[int]], limit: int) -> SuffixDraft:
    score, length, tokens = naive_propose(
        context,
        responses,
        limit=limit,
        max_depth=cache.max_tree_depth,
        max_spec_factor=Fraction(cache.max_spec_factor).limit_denominator(1000),
        min_token_prob=Fraction(cache.min_token_prob).limit_denominator(1000),
    )
    return SuffixDraft(token_ids=tokens, score=float(np.float32(float(score))), match_length=length)


def assert_equal(found: SuffixDraft, expected: SuffixDraft) -> None:
    assert (found.token_ids, found.match_length) == (expected.token_ids, expected.match_length)
    assert found.score == pytest.approx(expected.score, rel=1e-6)


@settings(deadline=None, derandomize=True, max_examples=300)
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
        for row, draft in zip(rows, drafts, strict=True):
            expected = expected_draft(cache, running[row], responses, limit)
            assert draft == expected.token_ids
            assert_equal(cache.propose(row, limit), expected)
        assert cache.num_responses == len(responses)
        check_pool(cache._forest, len(running))


@settings(deadline=None, derandomize=True, max_examples=150)
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
    fresh = make_cache(max_depth)
    for response in responses[num_evicted:]:
        fresh.insert(response)
    assert dump_shared(cache) == dump_shared(fresh)
    substrings = naive_substrings(responses[num_evicted:], max_depth)
    for string, (count, heaviest) in dump_shared(cache).items():
        assert count == substrings.counts[string]
        expected = substrings.heaviest(string)
        assert heaviest is None or heaviest[: len(string) + 1] == expected
