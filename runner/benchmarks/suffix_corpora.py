"""Made-up responses and requests that a suffix cache is timed on.

agent: responses that string together 2,000 segments, popular ones more often, with 3 % of the tokens replaced; requests
replay a cached response with 3 % more of them replaced. zipf, uniform: independent tokens, requests of the same
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proposers.lookup.suffix_forest import Int32Array

NAMES = ("agent", "zipf", "uniform")
VOCAB_SIZE = 32_000
NOISE = 0.03
NUM_SEGMENTS = 2_000


class Corpus:
    """Responses of one distribution, and requests that are like them."""

    def __init__(self, name: str, length: int, seed: int) -> None:
        self.name, self.length = name, length
        self.generator = np.random.default_rng(seed)
        self._zipf = np.cumsum(1 / np.arange(1, VOCAB_SIZE + 1))
        self._popular = np.cumsum(1 / np.arange(1, NUM_SEGMENTS + 1))
        if name == "agent":
            self._segments = [self._zipf_tokens(int(size)) for size in self.generator.integers(20, 120, NUM_SEGMENTS)]

    def response(self) -> Int32Array:
        if self.name == "uniform":
            return self.generator.integers(0, VOCAB_SIZE, self.length, dtype=np.int32)
        if self.name == "zipf":
            return self._zipf_tokens(self.length)
        parts, num_tokens = list[Int32Array](), 0
        while num_tokens < self.length:
            chosen = np.searchsorted(self._popular, self.generator.random() * self._popular[-1])
            parts.append(self._segments[int(chosen)])
            num_tokens += len(parts[-1])
        return self._noisy(np.concatenate(parts)[: self.length])

    def request(self, responses: Sequence[Int32Array]) -> Int32Array:
        if self.name == "agent":
            return self._noisy(responses[int(self.generator.integers(len(responses)))])
        return self.response()

    def _zipf_tokens(self, count: int) -> Int32Array:
        tokens: Int32Array = np.searchsorted(self._zipf, self.generator.random(count) * self._zipf[-1]).astype(np.int32)
        return tokens

    def _noisy(self, tokens: Int32Array) -> Int32Array:
        replaced = self.generator.random(len(tokens)) < NOISE
        other = self.generator.integers(0, VOCAB_SIZE, len(tokens), dtype=np.int32)
        return np.where(replaced, other, tokens).astype(np.int32)
