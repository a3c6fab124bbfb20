"""A compiled index of all n-grams of many growing sequences: what followed their last tokens earlier in the same text.

One call appends a step's new tokens to all sequences and drafts for all of them, at a cost of the new tokens and the
drafts only. Longest n-gram first, most recent occurrence among equals; a draft goes on into what it has just copied.

Each sequence owns one region of a shared int32 array: room for `capacity` tokens, then an open-addressing table (linear
probing, at most half full) of 2 * capacity entries a length n, the number of lengths rounded up to a power of two. An
entry is the position behind an n-gram's most recent occurrence, with a part of its hash in the bits that positions
leave free; a hit is compared with the text, so n-grams never merge. min_n 2 and max_n 5 cost 36 bytes a token of
capacity, and capacities are powers of two: 36 to 72 bytes a token held, and as much again for the moment in which the
array grows. Regions of finished sequences serve later ones of their size; the array never shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

MIN_CAPACITY_LOG2 = 8  # 256 tokens
# Columns of NgramIndex.sequences: where the region starts, log2 of its capacity, tokens held, and the position that
# followed the longest known n-gram at the end (0: none is known).
START, CAPACITY_LOG2, LENGTH, MATCH = range(4)


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
        lengths = self.sequences[numbers, LENGTH] + added
        for place in np.flatnonzero(lengths >> np.maximum(self.sequences[numbers, CAPACITY_LOG2], 0)):
            self._move(int(numbers[place]), int(lengths[place]))
        drafts = np.empty(wanted.sum(), dtype=np.int64)
        cu_num_drafts = np.zeros(len(numbers) + 1, dtype=np.int64)
        _extend_and_draft(
            self.pool, self.sequences, self.min_n, self.max_n, self.table_log2,
            numbers, token_ids, added, wanted, drafts, cu_num_drafts,
        )  # fmt: skip
        return drafts[: cu_num_drafts[-1]], cu_num_drafts

    def token_ids(self, sequence: int) -> list[int]:
        """The tokens held."""
        start, _, length, _ = self.sequences[sequence].tolist()
        held: list[int] = self.pool[start : start + length].tolist()
        return held

    @property
    def num_bytes(self) -> int:
        """Memory of all regions, free ones included; the array's pages behind them are not taken yet."""
        return self._pool_used * self.pool.itemsize + self.sequences.nbytes

    def _move(self, sequence: int, num_tokens: int) -> None:
        """Give a sequence a region with room for more than num_tokens tokens, and index again what it holds."""
        capacity_log2 = max(MIN_CAPACITY_LOG2, num_tokens.bit_length())
        start = self._allocate(capacity_log2)
        old_start, old_log2 = self.sequences[sequence, :2].tolist()
        _index_again(self.pool, self.sequences, self.min_n, self.max_n, self.table_log2, sequence, start, capacity_log2)
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


@numba.njit(inline="always")
def _append(
    pool: Int32Array,
    region: int,
    capacity_log2: int,
    length: int,
    token_id: int,
    min_n: int,
    max_n: int,
    table_log2: int,
) -> int:
    """Append a token and index the n-grams it ends; the position behind the longest one's last occurrence, or 0.

    The n-grams that end here are looked up and entered in one probe: what their entries held is the answer for the
    sequence as it is now, and what they hold from now on is the answer when the next tokens have come.
    """
    pool[region + length] = token_id
    end = length + 1
    table = region + (np.int64(1) << capacity_log2)
    slot_bits = capacity_log2 + table_log2
    last_slot = (np.int64(1) << slot_bits) - 1
    position_mask = (np.int64(1) << capacity_log2) - 1
    tag_mask = np.int64(0x7FFFFFFF) & ~position_mask
    match = np.int64(0)
    is_known = True  # the n-grams shorter than this one, so far as they are indexed, have occurred before
    state = np.uint64(0)
    for n in range(1, min(max_n, end) + 1):
        state = (state + np.uint64(pool[region + end - n]) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
        if n < min_n:
            continue
        hashed = state * np.uint64(0xBF58476D1CE4E5B9)
        slot = np.int64(hashed >> np.uint64(64 - slot_bits))
        tag = np.int64(hashed) & tag_mask
        found = np.int64(0)
        while True:
            entry = np.int64(pool[table + slot])
            if entry == 0:
                break
            # Where the shorter n-gram is new, this one is, and an equal tag is chance.
            if is_known and (entry & tag_mask) == tag:
                position = entry & position_mask
                offset = np.int64(1)
                while offset <= n and pool[region + position - offset] == pool[region + end - offset]:
                    offset += 1
                if offset > n:
                    found = position
                    break
            slot = (slot + 1) & last_slot
        pool[table + slot] = np.int32(tag | end)
        is_known = bool(found > 0)
        if is_known:
            match = found
    return match  # type: ignore[return-value]


@numba.njit(cache=True, nogil=True)
def _extend_and_draft(
    pool: Int32Array,
    sequences: Int64Array,
    min_n: int,
    max_n: int,
    table_log2: int,
    numbers: Int64Array,
    token_ids: Int32Array,
    num_new: Int64Array,
    num_wanted: Int64Array,
    drafts: Int64Array,
    cu_num_drafts: Int64Array,
) -> None:
    taken = 0
    given = 0
    for place in range(len(numbers)):
        row = sequences[numbers[place]]
        start, capacity_log2, length, match = row[START], row[CAPACITY_LOG2], row[LENGTH], row[MATCH]
        for token_id in token_ids[taken : taken + num_new[place]]:
            match = _append(pool, start, capacity_log2, length, token_id, min_n, max_n, table_log2)
            length += 1
        row[LENGTH], row[MATCH] = length, match
        taken += num_new[place]
        if match > 0:
            source = start + match
            for _ in range(num_wanted[place]):
                # Behind the end, what has just been copied: a match so near the end is a period, as in LZ77.
                drafts[given] = pool[source] if source < start + length else drafts[given - (length - match)]
                source += 1
                given += 1
        cu_num_drafts[place + 1] = given


@numba.njit(cache=True, nogil=True)
def _index_again(
    pool: Int32Array,
    sequences: Int64Array,
    min_n: int,
    max_n: int,
    table_log2: int,
    number: int,
    start: int,
    capacity_log2: int,
) -> None:
    row = sequences[number]
    old_start, length = row[START], row[LENGTH]
    capacity = np.int64(1) << capacity_log2
    pool[start + capacity : start + capacity + (capacity << table_log2)] = 0
    match = 0
    for position in range(length):
        token_id = pool[old_start + position]
        match = _append(pool, start, capacity_log2, position, token_id, min_n, max_n, table_log2)
    row[START], row[CAPACITY_LOG2], row[MATCH] = start, capacity_log2, match
