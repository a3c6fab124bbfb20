"""Drafts and scores are those of arctic-inference's C++ tree (arXiv 2411.04975): one of the request, one of responses.

What it drafted is kept in arctic_drafts.json, since it is seldom installed; where it is, the file is compared with it.
`python -m tests.test_suffix_oracle <its version>` writes the file anew.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proposers.lookup.suffix_cache import SuffixCache, SuffixDraft
from proposers.lookup.suffix_reference import Substrings, naive_substrings

FILE = Path(__file__).with_name("arctic_drafts.json")
NUM_CASES, NUM_TOKENS, MIN_TOKEN_PROB = 300, 6, 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    max_depth: int
    factor: float
    request: list[int]
    responses: list[list[int]]

    @property
    def context(self) -> list[int]:
        return self.request[-self.max_depth :]


def cases() -> Iterator[Case]:
    """Texts of few tokens, longer than the depth: of shorter ones that tree does not match the whole."""
    draw = random.Random(11).random  # the same numbers in every release of Python

    def below(stop: int, start: int = 0) -> int:
        return start + int(draw() * (stop - start))

    for number in range(NUM_CASES):
        max_depth, vocab_size, factor = below(9, 2), below(5, 2), [0.5, 1.0, 2.0][below(3)]
        texts = [[below(vocab_size) for _ in range(below(60, 9))] for _ in range(4)]
        yield Case(max_depth=max_depth, factor=factor, request=texts[0], responses=texts[1:] if number % 2 else [])


def of_arctic(case: Case, suffix_decoding: Any) -> dict[str, Any]:
    """The better of the drafts from its two trees."""
    trees = [suffix_decoding._C.SuffixTree(case.max_depth) for _ in range(2)]
    trees[0].extend(0, case.request)
    for index, response in enumerate(case.responses):
        trees[1].extend(index, response)
    own, shared = (tree.speculate(case.context, NUM_TOKENS, case.factor, 0.0, MIN_TOKEN_PROB, False) for tree in trees)
    best = own if own.score >= shared.score else shared
    # Of an empty draft it has the length of some match.
    return {
        "token_ids": list(best.token_ids),
        "score": best.score,
        "match_length": best.match_len if best.token_ids else 0,
    }


def has_tie(case: Case) -> bool:
    """Whether some token of a draft might as well be another: equal counts fall either way there."""
    for texts in ([case.request], case.responses):
        substrings = naive_substrings(texts, case.max_depth)
        if any(_ties(substrings, tuple(case.request[-length:])) for length in range(1, len(case.context))):
            return True
    return False


def _ties(substrings: Substrings, match: tuple[int, ...]) -> bool:
    for _ in range(NUM_TOKENS):
        counts = sorted(substrings.counts[(*match, token)] for token in substrings.followers.get(match, ()))
        if not counts:
            return False
        if counts[-1:] == counts[-2:-1]:
            return True
        longer = substrings.heaviest(match)
        assert longer is not None
        match = longer
    return False


def test_drafts_and_scores_are_those_of_arctic_inference() -> None:
    num_compared = 0
    for case, kept in zip(cases(), json.loads(FILE.read_text())["drafts"], strict=True):
        if has_tie(case):
            continue
        num_compared += 1
        cache = SuffixCache(
            max_tree_depth=case.max_depth,
            max_cached_requests=100,
            max_spec_factor=case.factor,
            min_token_prob=MIN_TOKEN_PROB,
        )
        row = cache.open()
        cache.append(row, np.array(case.request, dtype=np.int32))
        for response in case.responses:
            cache.insert(response)
        found, expected = cache.propose(row, NUM_TOKENS), SuffixDraft(**kept)
        assert (found.token_ids, found.match_length) == (expected.token_ids, expected.match_length)
        assert found.score == pytest.approx(expected.score, rel=1e-6)
    assert num_compared > 50


def test_the_drafts_that_are_kept_are_those_of_the_tree_that_is_installed() -> None:
    suffix_decoding = pytest.importorskip("arctic_inference.suffix_decoding")
    kept = json.loads(FILE.read_text())["drafts"]
    for case, draft in zip(cases(), kept, strict=True):
        if not has_tie(case):
            assert of_arctic(case, suffix_decoding) == {**draft, "score": pytest.approx(draft["score"], rel=1e-6)}


if __name__ == "__main__":
    from arctic_inference import suffix_decoding  # type: ignore[import-not-found]

    drafts = ",\n".join(json.dumps(of_arctic(case, suffix_decoding)) for case in cases())
    FILE.write_text(f'{{"made_by": "arctic-inference {sys.argv[1]}", "drafts": [\n{drafts}\n]}}\n')
