"""Suffix decoding written down plainly: all substrings with their counts, and drafts over every match.

The definition that the compiled trees are tested against; quadratic, exact (fractions), no part of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

String = tuple[int, ...]


@dataclass
class Substrings:
    """Every substring of up to max_depth tokens: how often it occurs, and when it was seen last."""

    max_depth: int
    counts: dict[String, int] = field(default_factory=dict)
    last_seen: dict[String, int] = field(default_factory=dict)
    followers: dict[String, set[int]] = field(default_factory=dict)
    clock: int = 0

    def add(self, text: Sequence[int]) -> None:
        for end in range(1, len(text) + 1):
            self.clock += 1
            for start in range(max(0, end - self.max_depth), end):
                string = tuple(text[start:end])
                self.counts[string] = self.counts.get(string, 0) + 1
                self.last_seen[string] = self.clock
                self.followers.setdefault(string[:-1], set()).add(string[-1])

    def heaviest(self, string: String) -> String | None:
        """The string with the token that followed it most often, most recently among equals."""
        longer = [(*string, token) for token in self.followers.get(string, ())]
        return max(longer, key=lambda found: (self.counts[found], self.last_seen[found]), default=None)

    def draft(self, match: String, num_tokens: int, min_token_prob: Fraction) -> tuple[Fraction, list[int]]:
        string, prob, score, tokens = match, Fraction(1), Fraction(0), list[int]()
        while len(tokens) < num_tokens and (longer := self.heaviest(string)) is not None:
            prob *= Fraction(self.counts[longer], self.counts[string])
            if prob < min_token_prob:
                break
            string, score = longer, score + prob
            tokens.append(longer[-1])
        return score, tokens


def naive_substrings(texts: Sequence[Sequence[int]], max_depth: int) -> Substrings:
    substrings = Substrings(max_depth)
    for text in texts:
        substrings.add(text)
    return substrings


def naive_propose(
    context: Sequence[int],
    responses: Sequence[Sequence[int]],
    *,
    limit: int,
    max_depth: int,
    max_spec_factor: Fraction,
    min_token_prob: Fraction,
) -> tuple[Fraction, int, list[int]]:
    """(score, match length, tokens): the highest score; the request's own tree, then the longest match among equals."""
    best: tuple[Fraction, int, list[int]] = (Fraction(0), 0, [])
    for texts in ([context], responses):
        substrings = naive_substrings(texts, max_depth)
        for length in range(min(len(context), max_depth - 1), 0, -1):
            match = tuple(context[-length:])
            if match not in substrings.counts:
                continue
            num_tokens = min(limit, int(length * max_spec_factor))
            score, tokens = substrings.draft(match, num_tokens, min_token_prob)
            if score > best[0]:
                best = (score, length, tokens)
    return best
