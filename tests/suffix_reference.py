"""Suffix decoding written down plainly: all substrings with their counts, and drafts over every match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from proposers.lookup.suffix_cache import SuffixCache
from proposers.lookup.suffix_forest import CHILD, COUNT, DEPTH, NEXT, PARENT, PREV, START, TOKEN, Forest, find

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


def dump(forest: Forest, root: int, text: Any) -> dict[String, tuple[int, String | None, int]]:
    """What a tree says, free of ids: string of each node -> count, string of its heaviest child, last occurrence.

    Checks on the way that links, hash, labels and bounds agree. text: position -> token.
    """
    nodes, said = forest.nodes, dict[String, tuple[int, String | None, int]]()

    def visit(node: int, string: String) -> None:
        depth = int(nodes[node, DEPTH])
        assert len(string) == depth
        children: list[int] = []
        child = int(nodes[node, CHILD])
        while child:
            assert int(nodes[child, PARENT]) == node
            assert find(nodes, forest.slots, node, int(nodes[child, TOKEN])) == child
            if children and children[0] != children[-1]:
                assert int(nodes[child, PREV]) == children[-1]
            children.append(child)
            child = int(nodes[child, NEXT])
        if node != root:
            counts = [int(nodes[child, COUNT]) for child in children]
            if children:
                assert counts[0] == max(counts)
                assert int(nodes[children[0], PREV]) >= max(counts[1:], default=0)
            assert sum(counts) <= int(nodes[node, COUNT])
        strings = []
        for child in children:
            start = int(nodes[child, START])
            label = tuple(text(start + place) for place in range(int(nodes[child, DEPTH])))
            assert label[:depth] == string and label[depth] == int(nodes[child, TOKEN])
            strings.append(label)
            visit(child, label)
        if node != root:
            said[string] = (int(nodes[node, COUNT]), strings[0] if strings else None, int(nodes[node, START]))

    visit(root, ())
    return said


def check_pool(forest: Forest, num_roots: int) -> None:
    """Every node is in use or free, every node but a root is in the hash once, and nothing else is."""
    used = int(forest.nodes[0, 1])
    parents = forest.nodes[1:used, PARENT]
    assert int((parents >= 0).sum()) == forest.num_nodes
    assert int((parents == 0).sum()) == num_roots
    assert int(np.count_nonzero(forest.slots)) == forest.num_nodes - num_roots


def dump_shared(cache: SuffixCache) -> dict[String, tuple[int, String | None]]:
    ring = cache._ring.tokens
    check_pool(cache._shared, 1)
    said = dump(cache._shared, cache._shared_root, lambda position: int(ring[position & (len(ring) - 1)]))
    return {string: (count, heaviest) for string, (count, heaviest, _) in said.items()}
