"""The children of a node: a doubly linked list whose head is the heaviest, the last seen among equals.

Only the head is in its place. Its PREV, which a head does not need, bounds the counts of all others from above, so that
a head that loses weight is compared with its siblings only when one of them may have become heavier.
A root's children are linked only to be found again: nothing is ever drafted from an empty match.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from proposers.lookup.suffix_forest import CHILD, COUNT, NEXT, PARENT, PREV, START, Int32Array

LISTED = 2**31 - 1  # as a bound: the family is on the list of those to be searched


@compiled
def _push_front(nodes: Int32Array, parent: int, child: int, head: int) -> None:
    nodes[child, NEXT] = head
    nodes[child, PREV] = nodes[head, COUNT]
    nodes[head, PREV] = child
    nodes[parent, CHILD] = child


@compiled
def add_child(nodes: Int32Array, parent: int, child: int) -> None:
    """Link a new node, of count 1, under its parent."""
    head = int(nodes[parent, CHILD])
    if head == 0:
        nodes[parent, CHILD] = child
    elif nodes[head, COUNT] <= 1 or nodes[parent, PARENT] == 0:
        _push_front(nodes, parent, child, head)
    else:
        behind = int(nodes[head, NEXT])
        nodes[child, NEXT] = behind
        nodes[child, PREV] = head
        nodes[head, NEXT] = child
        if behind != 0:
            nodes[behind, PREV] = child
        nodes[head, PREV] = max(nodes[head, PREV], 1)


@compiled
def count_up(nodes: Int32Array, parent: int, child: int) -> None:
    """One more window enters the child."""
    count = nodes[child, COUNT] + 1
    nodes[child, COUNT] = count
    head = int(nodes[parent, CHILD])
    if child == head or nodes[parent, PARENT] == 0:
        return
    if count >= nodes[head, COUNT]:
        unlink(nodes, parent, child)
        _push_front(nodes, parent, child, head)
    elif count > nodes[head, PREV]:
        nodes[head, PREV] = count


@compiled
def unlink(nodes: Int32Array, parent: int, child: int) -> None:
    """Take a child out of the list. Behind a head, the next one becomes head, with the bound, whatever its weight."""
    behind, before = int(nodes[child, NEXT]), int(nodes[child, PREV])
    if nodes[parent, CHILD] == child:
        nodes[parent, CHILD] = behind
        before = int(nodes[child, PREV])  # the bound
    else:
        nodes[before, NEXT] = behind
    if behind != 0:
        nodes[behind, PREV] = before


@compiled
def take_place(nodes: Int32Array, parent: int, old: int, new: int) -> None:
    """Link `new`, of the same count, where `old` is linked."""
    behind, before = int(nodes[old, NEXT]), int(nodes[old, PREV])
    nodes[new, NEXT] = behind
    nodes[new, PREV] = before
    if behind != 0:
        nodes[behind, PREV] = new
    if nodes[parent, CHILD] == old:
        nodes[parent, CHILD] = new
    else:
        nodes[before, NEXT] = new


@compiled
def may_have_lost(nodes: Int32Array, parent: int, child: int) -> bool:
    """After a child lost weight or left: whether its family must be searched, and is not listed for it yet.

    The caller lists it; the mark is the bound of the head.
    """
    head = int(nodes[parent, CHILD])
    if head == 0 or nodes[parent, PARENT] == 0 or nodes[head, PREV] == LISTED:
        return False
    if child == head and nodes[head, COUNT] > nodes[head, PREV]:
        return False
    nodes[head, PREV] = LISTED
    return True


@compiled
def search_head(nodes: Int32Array, parent: int) -> None:
    """Bring the heaviest child to the front, the last seen among equals, and make the bound exact."""
    head = int(nodes[parent, CHILD])
    nodes[head, PREV] = 0
    best, second = head, 0
    child = int(nodes[head, NEXT])
    while child != 0:
        count, most = nodes[child, COUNT], nodes[best, COUNT]
        # Positions wrap around: the later one is the one whose difference is positive.
        if count > most or (count == most and np.int32(nodes[child, START] - nodes[best, START]) > 0):
            best = child
            second = max(second, most)
        else:
            second = max(second, count)
        child = int(nodes[child, NEXT])
    if best != head:
        unlink(nodes, parent, best)
        _push_front(nodes, parent, best, head)
    nodes[best, PREV] = second
