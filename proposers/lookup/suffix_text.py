"""Room for token ids: a pool of texts that grow, and a ring of texts of which the oldest goes first."""

from __future__ import annotations

import numpy as np

from proposers.lookup.suffix_forest import Int32Array


def power_of_two(number: int) -> int:
    """The smallest power of two that is >= number."""
    return 1 << max(0, number - 1).bit_length()


class TextPool:
    """One array that hands out segments whose sizes are powers of two, and takes them back."""

    smallest = 256  # tokens

    def __init__(self) -> None:
        self.tokens: Int32Array = np.zeros(0, dtype=np.int32)
        self._end = 0
        self._free: dict[int, list[int]] = {}  # size -> where segments start

    def take(self, size: int) -> int:
        """Start of a segment. May move the array: nobody else may hold on to it."""
        if self._free.get(size):
            return self._free[size].pop()
        base = self._end
        self._end += size
        if self._end > len(self.tokens):
            self.tokens.resize(max(self._end, len(self.tokens) * 5 // 4), refcheck=False)
        return base

    def give(self, base: int, size: int) -> None:
        self._free.setdefault(size, []).append(base)


class TextRing:
    """Texts one behind the other; a position keeps its meaning, and wraps around at 32 bits.

    The size is a power of two: position & (size - 1) is where its token lies.
    """

    def __init__(self) -> None:
        self.tokens: Int32Array = np.zeros(1024, dtype=np.int32)
        self._begin, self._end = 0, 0

    def append(self, text: Int32Array) -> tuple[int, int]:
        """Positions of a new text, [begin, end)."""
        begin, self._end = self._end, self._end + len(text)
        if self._end - self._begin > len(self.tokens):
            self._grow(begin)
        self.tokens[np.arange(begin, self._end) & (len(self.tokens) - 1)] = text
        return begin, self._end

    def drop(self, length: int) -> tuple[int, int]:
        """Positions of the oldest text, whose room is free after the caller has read it."""
        begin = self._begin
        self._begin += length
        return begin, self._begin

    def _grow(self, end: int) -> None:
        """Twice the room or more for the texts up to `end`."""
        old = self.tokens
        self.tokens = np.zeros(power_of_two(self._end - self._begin), dtype=np.int32)
        wrap = min(end, (self._begin | (len(old) - 1)) + 1)  # where the old ring goes back to its start
        for first, last in ((self._begin, wrap), (wrap, end)):
            source, target = first & (len(old) - 1), first & (len(self.tokens) - 1)
            self.tokens[target : target + last - first] = old[source : source + last - first]
