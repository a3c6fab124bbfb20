"""A compiled index of all n-grams of many growing sequences: what followed their last tokens earlier in the same text.

One call appends a step's new tokens to all sequences and drafts for all of them, at a cost of the new tokens and the
drafts only. Longest n-gram first, most recent occurrence among equals; a draft goes on into what it has just copied.

Each sequence owns one region of a shared int32 array: room for `capacity` tokens, then an open-addressing table (linear
probing, at most half full) of 2 * capacity entries a length n, the number of lengths rounded up to a power of two. A
hit is compared with the text, so n-grams never merge. min_n 2 and max_n 5 cost 36 bytes a token of capacity, and
capacities are powers of two: 36 to 72 bytes a token held, and as much again for the moment in which the array grows.
Regions of finished sequences serve later ones of their size; the array never shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proposers.lookup.ngram_table import CAPACITY_LOG2, LENGTH, Int32Array, Int64Array, extend_and_draft, move

MIN_CAPACITY_LOG2 = 8  # 256 tokens


class NgramIndex:
    """Sequences are numbered by `add`, and their numbers used again after `release`."""

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n and max_n must satisfy 1 <= min_n <= max_n, got {min_n} and {max_n}")
        self.min_n, self.max_n = min_n, max_n
        self.table_log2 = (max_n - min_n).bit_length() + 1  # entries a token of capacity
        self.pool: Int32Array = np.zeros(0, dtype=np.int32)
        self.sequences: Int64Array = np.zeros((0, 4), dtype=np.int64)
        self._pool_used = 0  # what lies behind was never a region
        self._free_regions: dict[int, list[int]] = {}  # log2 of the capacity -> starts
        self._free_sequences: list[int] = []
        self._compile()

    def add(self) -> int:
        """The number of a new, empty sequence."""
        if not self._free_sequences:
            count = len(self.sequences)
            self.sequences = np.concatenate([self.sequences, np.zeros((max(count, 16), 4), dtype=np.int64)])
            self._free_sequences = list(range(len(self.sequences) - 1, count - 1, -1))
        sequence = self._free_sequences.pop()
        self.sequences[sequence] = (0, -1, 0, 0)
        return sequence

    def release(self, sequence: int) -> None:
        """Forget a sequence; its memory serves the next one of its size."""
        start, capacity_log2 = self.sequences[sequence, :2].tolist()
        if capacity_log2 >= 0:
            self._free_regions.setdefault(capacity_log2, []).append(start)
        self._free_sequences.append(sequence)

    def extend_and_draft(
        self, sequences: Sequence[int], new_token_ids: Sequence[int], num_new: Sequence[int], num_drafts: Sequence[int]
    ) -> tuple[Int64Array, Int64Array]:
        """Append tokens to sequences, then draft for each of them.

        Args:
            sequences: numbers, no one twice.
            new_token_ids: of all of them, one after another, each in [0, 2**31 - 1].
            num_new: how many of them each sequence gets.
            num_drafts: tokens to draft for each, 0 for none.

        Returns:
            token_ids [sum of drafts], and cu_num_draft_tokens [B + 1]; a sequence gets all it wants or, where its last
            min_n tokens have not occurred before, nothing.
        """
        numbers, added, wanted = (np.array(values, dtype=np.int64) for values in (sequences, num_new, num_drafts))
        token_ids = np.array(new_token_ids, dtype=np.int32)
        assert added.sum() == len(token_ids), "num_new must tell whose every new token is"
        self.make_room(numbers, added)
        drafts = np.empty(wanted.sum(), dtype=np.int64)
        cu_num_drafts = np.zeros(len(numbers) + 1, dtype=np.int64)
        extend_and_draft(
            self.pool, self.sequences, self.min_n, self.max_n, self.table_log2,
            numbers, token_ids, added, wanted, drafts, cu_num_drafts,
        )  # fmt: skip
        return drafts[: cu_num_drafts[-1]], cu_num_drafts

    def make_room(self, numbers: Int64Array, num_new: Int64Array) -> None:
        """Give each sequence a larger region where its new tokens do not fit."""
        lengths = self.sequences[numbers, LENGTH] + num_new
        for place in np.flatnonzero(lengths >> np.maximum(self.sequences[numbers, CAPACITY_LOG2], 0)):
            self._move(int(numbers[place]), int(lengths[place]))

    def token_ids(self, sequence: int) -> list[int]:
        """The tokens held."""
        start, _, length, _ = self.sequences[sequence].tolist()
        held: list[int] = self.pool[start : start + length].tolist()
        return held

    @property
    def num_bytes(self) -> int:
        """Memory of all regions, free ones included; the array's pages behind them are not taken yet."""
        return self._pool_used * self.pool.itemsize + self.sequences.nbytes

    def _compile(self) -> None:
        """Now, rather than in somebody's first step."""
        sequence = self.add()
        self.extend_and_draft([sequence], [0], [1], [1])
        self.release(sequence)

    def _move(self, sequence: int, num_tokens: int) -> None:
        """Give a sequence a region with room for more than num_tokens tokens, and index again what it holds."""
        capacity_log2 = max(MIN_CAPACITY_LOG2, num_tokens.bit_length())
        start = self._allocate(capacity_log2)
        old_start, old_log2 = self.sequences[sequence, :2].tolist()
        move(self.pool, self.sequences, self.min_n, self.max_n, self.table_log2, sequence, start, capacity_log2)
        if old_log2 >= 0:
            self._free_regions.setdefault(old_log2, []).append(old_start)

    def _allocate(self, capacity_log2: int) -> int:
        """The start of a region, its content undefined."""
        free = self._free_regions.get(capacity_log2)
        if free:
            return free.pop()
        start = self._pool_used
        self._pool_used += (1 << capacity_log2) + (1 << capacity_log2 + self.table_log2)
        if self._pool_used > len(self.pool):
            # Twice what is used: a region is copied a constant number of times. Pages are taken when touched.
            grown = np.empty(2 * self._pool_used, dtype=np.int32)
            grown[:start] = self.pool[:start]
            self.pool = grown
        return start
