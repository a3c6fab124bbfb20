"""Suffix decoding's memory: a tree for each running request and one shared by the responses that have finished.

The host side: rows, room for texts and nodes, which response goes when. All work on trees is one compiled call a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from proposers.lookup.suffix_draft import (
    BASE,
    CAPACITY,
    LENGTH,
    MATCH_LENGTH,
    NUM_COLUMNS,
    NUM_DRAFTED,
    ROOT,
    SCORE,
    TOKENS,
    step,
)
from proposers.lookup.suffix_forest import Forest, Int32Array, new_node
from proposers.lookup.suffix_text import TextPool, TextRing, power_of_two
from proposers.lookup.suffix_tree import evict_response, insert_response, release_tree

NOTHING = np.empty(0, dtype=np.int32)


class SuffixDraft(NamedTuple):  # made in a third of a frozen dataclass's time, which is a third of a proposal's
    token_ids: list[int]
    score: float  # tokens expected to be accepted
    match_length: int  # tokens of the context that were found; 0 when the draft is empty


class SuffixCache:
    """Trees over requests and responses, of token ids in [0, 2**31).

    Args:
        max_tree_depth: tokens matched and drafted together at most.
        max_cached_requests: finished responses kept, first in first out; 0 keeps none.
        max_spec_factor: drafted tokens at most, as a multiple of the match.
        min_token_prob: a draft ends before the token whose estimated probability of being reached is lower.
    """

    def __init__(
        self, *, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests
        self.max_spec_factor, self.min_token_prob = float(max_spec_factor), float(min_token_prob)
        ring = power_of_two(max_tree_depth)
        self._forest, self._texts = Forest(), TextPool()
        self._rows: Int32Array = np.zeros((16, NUM_COLUMNS + 2 * ring), dtype=np.int32)
        self._free_rows = list(range(len(self._rows)))
        self._room: dict[int, int] = {}  # tokens that each row's text may still grow by where it is
        self._active: Int32Array = np.zeros(ring, dtype=np.int32)  # of a response on its way into the shared tree
        self._version = 1  # of the shared tree; a new row has seen none
        self._shared, self._ring = Forest(), TextRing()
        self._responses: deque[int] = deque()  # lengths, the oldest first
        self._shared_root = int(new_node(self._shared.nodes, 0, 0, 0, 0, 0)) if max_cached_requests > 0 else 0
        self._jobs: Int32Array = np.zeros((1, 3), dtype=np.int32)
        self._make_drafts(1)

    @property
    def num_responses(self) -> int:
        return len(self._responses)

    @property
    def num_shared_bytes(self) -> int:
        """Of the finished responses: nodes, hash and texts."""
        return self._shared.num_bytes + self._ring.tokens.nbytes

    def open(self) -> int:
        """A row for a request, its text empty."""
        if not self._free_rows:
            num_rows = len(self._rows)
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._free_rows = list(range(num_rows, 2 * num_rows))
        row = self._free_rows.pop()
        self._forest.reserve(1)
        capacity = TextPool.smallest
        self._rows[row, :NUM_COLUMNS] = 0
        self._rows[row, ROOT] = new_node(self._forest.nodes, 0, 0, 0, 0, 0)
        self._rows[row, BASE], self._rows[row, CAPACITY] = self._texts.take(capacity), capacity
        self._room[row] = capacity
        return row

    def close(self, row: int) -> None:
        """Forget a request."""
        del self._room[row]
        release_tree(self._forest.nodes, self._forest.slots, int(self._rows[row, ROOT]))
        self._texts.give(int(self._rows[row, BASE]), int(self._rows[row, CAPACITY]))
        self._free_rows.append(row)

    def step(self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[int]]:
        """For each row: take in its new tokens, draft at most so many. Linear in the new tokens, not in the texts."""
        drafts = self._drafts_for(rows, new_tokens, limits, drafts_trees=False).tolist()
        return [draft[TOKENS : TOKENS + draft[NUM_DRAFTED]] for draft in drafts]

    def step_scored(
        self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> list[SuffixDraft]:
        """`step` with what is known of each draft."""
        drafts = self._drafts_for(rows, new_tokens, limits, drafts_trees=False)
        scores = drafts.view(np.float32)[:, SCORE].tolist()
        return [
            SuffixDraft(draft[TOKENS : TOKENS + draft[NUM_DRAFTED]], score, draft[MATCH_LENGTH])
            for draft, score in zip(drafts.tolist(), scores, strict=True)
        ]

    def step_trees(
        self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> list[tuple[list[int], list[int]]]:
        """`step` with trees of the likeliest continuations: (tokens, parents) of each row, the likeliest first.

        A parent is the place of an earlier token of the tree, -1 for what follows the text.
        """
        drafts = self._drafts_for(rows, new_tokens, limits, drafts_trees=True).tolist()
        trees = []
        for draft, limit in zip(drafts, limits, strict=True):
            num_nodes, parents = draft[NUM_DRAFTED], TOKENS + limit
            trees.append((draft[TOKENS : TOKENS + num_nodes], draft[parents : parents + num_nodes]))
        return trees

    def _drafts_for(
        self, rows: Sequence[int], new_tokens: Sequence[Sequence[int]], limits: Sequence[int], *, drafts_trees: bool
    ) -> Int32Array:
        counts = [len(tokens) for tokens in new_tokens]
        jobs = np.array([rows, counts, limits], dtype=np.int32).T.copy()
        flat = np.array([token for tokens in new_tokens for token in tokens], dtype=np.int32)
        for row, count in zip(rows, counts, strict=True):
            self._make_room(row, count)
        self._forest.reserve(2 * (len(flat) + len(rows) * self.max_tree_depth))
        drafts: Int32Array = np.empty((len(rows), TOKENS + 2 * max(limits, default=0)), dtype=np.int32)
        self._step(jobs, len(rows), flat, drafts, drafts_trees)
        return drafts

    def append(self, row: int, tokens: Int32Array) -> None:
        """Take in the new tokens of one row. [num_new] int32"""
        count = len(tokens)
        self._make_room(row, count)
        self._forest.reserve(2 * (count + self.max_tree_depth))
        self._jobs[0] = row, count, 0
        self._step(self._jobs, 1, tokens, self._drafts, False)

    def propose(self, row: int, limit: int) -> SuffixDraft:
        """Draft at most `limit` tokens for one row."""
        if self._drafts.shape[1] < TOKENS + 2 * limit:
            self._make_drafts(limit)
        self._jobs[0] = row, 0, limit
        self._step(self._jobs, 1, NOTHING, self._drafts, False)
        num_drafted, match_length, _, *tokens = self._drafts[0].tolist()
        return SuffixDraft(tokens[:num_drafted], self._scores.item(SCORE), match_length)

    def insert(self, response: Sequence[int] | Int32Array) -> None:
        """Keep a finished response; the oldest ones go when there are too many, or too many nodes.

        One that is too long for an empty cache is not kept.
        """
        num_nodes = 2 * len(response)  # at most: a token brings a leaf, and may split an edge
        if self.max_cached_requests == 0 or num_nodes == 0 or num_nodes >= self._shared.capacity:  # the root has one
            return
        while len(self._responses) == self.max_cached_requests or num_nodes > self._shared.room:
            self.evict()
        begin, end = self._ring.append(np.asarray(response, dtype=np.int32))
        self._responses.append(end - begin)
        self._shared.reserve(num_nodes)
        forest = self._shared
        insert_response(
            forest.nodes, forest.slots, self._ring.tokens, self._shared_root, self._active, begin, end,
            self.max_tree_depth,
        )  # fmt: skip
        self._version += 1

    def evict(self) -> None:
        """Drop the oldest response."""
        begin, end = self._ring.drop(self._responses.popleft())
        forest = self._shared
        evict_response(
            forest.nodes, forest.slots, self._ring.tokens, self._shared_root, begin, end, self.max_tree_depth
        )
        self._version += 1

    def _make_drafts(self, limit: int) -> None:
        self._drafts: Int32Array = np.zeros((1, TOKENS + 2 * limit), dtype=np.int32)
        self._scores = self._drafts[0].view(np.float32)

    def _make_room(self, row: int, num_new: int) -> None:
        """For the text of a row; a larger segment when its own is full."""
        self._room[row] -= num_new
        if self._room[row] < 0:
            base, capacity = int(self._rows[row, BASE]), int(self._rows[row, CAPACITY])
            length = int(self._rows[row, LENGTH])
            larger = power_of_two(length + num_new)
            new_base = self._texts.take(larger)
            self._texts.tokens[new_base : new_base + length] = self._texts.tokens[base : base + length]
            self._texts.give(base, capacity)
            self._rows[row, BASE], self._rows[row, CAPACITY] = new_base, larger
            self._room[row] = larger - length - num_new

    def _step(
        self, jobs: Int32Array, num_jobs: int, new_tokens: Int32Array, drafts: Int32Array, drafts_trees: bool
    ) -> None:
        own, shared = self._forest, self._shared
        step(
            own.nodes, own.slots, self._texts.tokens, shared.nodes, shared.slots, self._ring.tokens, self._rows,
            jobs, num_jobs, new_tokens, drafts, self._shared_root, self._version, self.max_tree_depth,
            self.max_spec_factor, self.min_token_prob, drafts_trees,
        )  # fmt: skip


def compile_suffix_cache() -> None:
    """Compile, or load, everything that a cache calls, so that no step waits for it (seconds, once a machine)."""
    cache = SuffixCache(max_tree_depth=4, max_cached_requests=1, max_spec_factor=1.0, min_token_prob=0.1)
    row = cache.open()
    cache.step([row], [[1, 2, 1]], [2])
    cache.close(row)
    for response in ([1, 2, 1], [2, 2]):
        cache.insert(response)
