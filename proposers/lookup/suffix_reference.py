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

    def tree(self, match: String, num_nodes: int, min_token_prob: Fraction) -> tuple[Fraction, list[int], list[int]]:
        """(score, tokens, parents): the num_nodes likeliest continuations, the likeliest first.

        Of equals the one with the earlier parent comes first, then its heaviest child, then the lowest token.
        """
        score, tokens, parents = Fraction(0), list[int](), list[int]()
        waiting: list[tuple[String, int]] = []
        string, node = match, -1
        while len(tokens) < num_nodes:
            heaviest = self.heaviest(string)
            followers = sorted(self.followers.get(string, ()), key=lambda token: ((*string, token) != heaviest, token))
            waiting += [((*string, token), node) for token in followers]
            waiting = [one for one in waiting if Fraction(self.counts[one[0]], self.counts[match]) >= min_token_prob]
            if not waiting:
                break
            best = max(self.counts[found] for found, _ in waiting)
            found = next(one for one in waiting if self.counts[one[0]] == best)
            waiting.remove(found)
            string, parent = found
            score += Fraction(best, self.counts[match])
            node = len(tokens)
            tokens.append(string[-1])
            parents.append(parent)
        return score, tokens, parents


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
    drafts_trees: bool = False,
) -> tuple[Fraction, int, list[int], list[int]]:
    """(score, match length, tokens, parents): the highest score; the request's own tree, then the longest match.

    A tree has as many nodes at most as a chain has tokens, of which there are max_depth with the match.
    """
    best: tuple[Fraction, int, list[int], list[int]] = (Fraction(0), 0, [], [])
    for texts in ([context], responses):
        substrings = naive_substrings(texts, max_depth)
        for length in range(min(len(context), max_depth - 1), 0, -1):
            match = tuple(context[-length:])
            if match not in substrings.counts:
                continue
            num_tokens = min(limit, int(length * max_spec_factor), max_depth - length)
            if drafts_trees:
                score, tokens, parents = substrings.tree(match, num_tokens, min_token_prob)
            else:
                score, tokens = substrings.draft(match, num_tokens, min_token_prob)
                parents = list(range(-1, len(tokens) - 1))
            if score > best[0]:
                best = (score, length, tokens, parents)
    return best
