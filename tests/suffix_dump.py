"""Reads a compiled suffix tree back, free of ids, and checks on the way that all parts of it agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from proposers.lookup.suffix_cache import SuffixCache
from proposers.lookup.suffix_forest import (
    CHILD,
    COUNT,
    DEPTH,
    FIRST_SEGMENT,
    LENGTHS,
    LOADS,
    NEXT,
    PARENT,
    PREV,
    START,
    TOKEN,
    USED,
    Forest,
    find,
)
from proposers.lookup.suffix_reference import String


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
    used = int(forest.nodes[0, USED])
    parents = forest.nodes[1:used, PARENT]
    assert int((parents >= 0).sum()) == forest.num_nodes
    assert int((parents == 0).sum()) == num_roots
    assert int(np.count_nonzero(forest.slots[FIRST_SEGMENT:])) == forest.num_nodes - num_roots
    assert int(forest.slots[LOADS:LENGTHS].sum()) == forest.num_nodes - num_roots


def dump_shared(cache: SuffixCache) -> dict[String, tuple[int, String | None]]:
    ring = cache._ring.tokens
    check_pool(cache._shared, 1)
    said = dump(cache._shared, cache._shared_root, lambda position: int(ring[position & (len(ring) - 1)]))
    return {string: (count, heaviest) for string, (count, heaviest, _) in said.items()}
