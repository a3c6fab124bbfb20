"""The tree of the likeliest continuations of a match, as a suffix tree counts them: suffix decoding's other draft.

A continuation's probability is its count over the match's. Nodes are taken one by one, the likeliest first, so their
number goes to depth where one continuation is certain and to breadth where several are likely (the tree of
arXiv 2411.04975). Counts are those of suffix_draft.py: windows that wait inside an edge go no further.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from proposers.lookup.suffix_forest import CHILD, COUNT, DEPTH, NEXT, START, TOKEN, Int32Array
from proposers.lookup.wide import wide

EPSILON = 1e-9  # scores and probabilities closer than this are equal

# Columns of a continuation that waits to be taken
NODE = 0  # its last token is in the edge of this node
LENGTH = 1  # of its string, the match included
PARENT = 2  # what it continues, by the order of taking; -1: the match
OCCURRENCES = 3
IS_HEAVIEST = 4  # of its parent's children
LAST_TOKEN = 5
NUM_COLUMNS = 6


@compiled
def occurrences(nodes: Int32Array, node: int, length: int, active: Int32Array, num_active: int, text_end: int) -> int:
    """How often a string of this length, which ends in the edge of a node, occurs."""
    ring = active.size - 1
    count = int(nodes[node, COUNT])
    for shorter in range(1, min(length, num_active + 1)):
        if active[(text_end - shorter) & ring] == node:
            count -= 1
    return count


@compiled
def _continue(
    nodes: Int32Array,
    text: Int32Array,
    base: int,
    mask: int,
    node: int,
    length: int,
    parent: int,
    at_least: float,  # occurrences
    active: Int32Array,
    num_active: int,
    text_end: int,
    waiting: Int32Array,  # [capacity, NUM_COLUMNS]
    num_waiting: int,
) -> tuple[Int32Array, int]:
    """Add what may follow a string; the array is another one when it was too small."""
    edge_end = int(nodes[node, DEPTH])
    if num_active > 0:
        edge_end = min(edge_end, text_end - int(nodes[node, START]))  # a leaf's edge ends with the text
    in_edge = length < edge_end
    child = node if in_edge else int(nodes[node, CHILD])
    heaviest = child
    while child != 0:
        count = int(nodes[child, COUNT])
        token = int(nodes[child, TOKEN])
        if in_edge:
            count = occurrences(nodes, node, length + 1, active, num_active, text_end)
            token = int(text[base + ((int(nodes[node, START]) + length) & mask)])
        if count > 0 and count >= at_least:
            if num_waiting == len(waiting):
                larger = np.empty((2 * num_waiting, NUM_COLUMNS), dtype=np.int32)
                for place in range(num_waiting):  # by elements: a slice brings numba's text of its errors along
                    for column in range(NUM_COLUMNS):
                        larger[place, column] = waiting[place, column]
                waiting = larger
            one = waiting[num_waiting]
            one[NODE], one[LENGTH], one[PARENT], one[OCCURRENCES] = child, length + 1, parent, count
            one[IS_HEAVIEST], one[LAST_TOKEN] = child == heaviest, token
            num_waiting += 1
        child = 0 if in_edge else int(nodes[child, NEXT])
    return waiting, num_waiting


@compiled
def _comes_before(one: Int32Array, other: Int32Array) -> bool:
    if one[OCCURRENCES] != other[OCCURRENCES]:
        return bool(one[OCCURRENCES] > other[OCCURRENCES])
    if one[PARENT] != other[PARENT]:
        return bool(one[PARENT] < other[PARENT])
    if one[IS_HEAVIEST] != other[IS_HEAVIEST]:
        return bool(one[IS_HEAVIEST] > other[IS_HEAVIEST])
    return bool(one[LAST_TOKEN] < other[LAST_TOKEN])


@compiled
def grow(
    nodes: Int32Array,
    text: Int32Array,
    base: int,
    mask: int,
    node: int,
    length: int,  # of the match, which ends in the edge of `node`
    num_nodes: int,  # at most
    min_token_prob: float,
    active: Int32Array,
    num_active: int,  # 0 in the shared tree, where no window waits inside an edge
    text_end: int,
    tokens: Int32Array,  # [num_nodes or more] or empty: takes the tokens, the likeliest first
    parents: Int32Array,  # the same of their parents
) -> tuple[float, int]:
    """Score of the tree behind a match, the tokens it is expected to yield, and its number of nodes."""
    total = occurrences(nodes, node, length, active, num_active, text_end)
    at_least = (min_token_prob - EPSILON) * total
    waiting = np.empty((32, NUM_COLUMNS), dtype=np.int32)
    waiting, num_waiting = _continue(
        nodes, text, base, mask, node, length, wide(-1), at_least, active, num_active, text_end, waiting, wide(0)
    )
    score, num_taken = 0.0, 0
    while num_waiting > 0 and num_taken < num_nodes:
        first = 0
        for other in range(1, num_waiting):
            if _comes_before(waiting[other], waiting[first]):
                first = other
        one = waiting[first].copy()
        num_waiting -= 1
        for column in range(NUM_COLUMNS):
            waiting[first, column] = waiting[num_waiting, column]
        if tokens.size > 0:
            tokens[num_taken], parents[num_taken] = one[LAST_TOKEN], one[PARENT]
        score += one[OCCURRENCES] / total
        waiting, num_waiting = _continue(
            nodes, text, base, mask, wide(one[NODE]), wide(one[LENGTH]), wide(num_taken), at_least, active,
            num_active, text_end, waiting, wide(num_waiting),
        )  # fmt: skip
        num_taken += 1
    return score, num_taken
