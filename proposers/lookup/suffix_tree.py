"""Suffix trees of bounded depth over texts that grow: every window of max_depth tokens, with its count.

A window is the part of a text that starts at one position, max_depth tokens or to the end. The count of a node is the
number of windows that entered its edge, so occurrences of a string are what lies between counts. Windows that have not
yet come to a token of their own wait inside an edge (Ukkonen's active points, one for each length of the repeated
suffix), and an edge to a leaf ends where the text does: a token costs time in the length of what it repeats.

A text is text[base + (position & mask)], a ring when it is shared by responses that come and go.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from proposers.lookup.suffix_family import (
    add_child,
    count_up,
    may_have_lost,
    search_head,
    take_place,
    unlink,
)
from proposers.lookup.suffix_forest import (
    CHILD,
    COUNT,
    DEPTH,
    LIVE,
    NEXT,
    PARENT,
    PREV,
    START,
    TOKEN,
    Int32Array,
    Uint32Array,
    enter,
    find,
    free_node,
    leave,
    new_node,
    rename,
)
from proposers.lookup.wide import wide


@compiled
def _split(
    nodes: Int32Array, slots: Uint32Array, token: int, active: Int32Array, node: int, position: int, length: int
) -> int:
    """End an edge at depth `length`, where the active window of that length is; returns the new upper node.

    token: what follows there in the edge. position: the end of the text, so a window of length l starts l before it.
    Longer windows are not active any more.
    """
    parent = int(nodes[node, PARENT])
    upper = new_node(nodes, parent, nodes[node, TOKEN], length, position - length, nodes[node, COUNT])
    rename(nodes, slots, node, upper)
    take_place(nodes, parent, node, upper)
    num_inside = 1
    for shorter in range(1, length):
        place = (position - shorter) & (active.size - 1)
        if active[place] == node:
            active[place] = upper
            num_inside += 1
    nodes[node, PARENT] = upper
    nodes[node, TOKEN] = token
    nodes[node, COUNT] -= num_inside
    nodes[node, NEXT] = 0
    nodes[node, PREV] = 0
    nodes[upper, CHILD] = node
    enter(nodes, slots, node)
    return upper


@compiled
def extend(
    nodes: Int32Array,
    slots: Uint32Array,
    text: Int32Array,
    base: int,
    mask: int,
    root: int,
    active: Int32Array,  # [power of two >= max_depth]: node at or below the window starting at position & (size - 1)
    num_active: int,  # windows of length 1..num_active wait inside edges
    begin: int,
    end: int,
    last: int,  # where the windows end: `end`, or beyond any position while the text grows
    max_depth: int,
) -> int:
    """Take the tokens at positions begin..end-1 into the tree; returns the new num_active."""
    ring = active.size - 1
    for position in range(begin, end):
        token = text[base + (position & mask)]
        is_new = True  # windows, the longest first, come to a token of their own until one does not
        for start in range(position - num_active, position + 1):
            length = position - start
            node = wide(active[start & ring]) if length > 0 else root
            depth = nodes[node, DEPTH]
            if length < depth:
                if is_new:
                    expected = text[base + ((nodes[node, START] + length) & mask)]
                    if expected != token:
                        node = _split(nodes, slots, expected, active, node, position, length)
                        child = new_node(nodes, node, token, min(max_depth, last - start), start, 1)
                        enter(nodes, slots, child)
                        add_child(nodes, node, child)
                        continue
            else:
                nodes[node, START] = start  # the latest occurrence: those before it may be evicted
                child = find(nodes, slots, node, token)
                if child == 0:
                    child = new_node(nodes, node, token, min(max_depth, last - start), start, 1)
                    enter(nodes, slots, child)
                    add_child(nodes, node, child)
                    continue
                count_up(nodes, node, child)
                active[start & ring] = child
                node = child
            if is_new:
                is_new = False
                num_active = length + 1
                if num_active == max_depth:  # complete
                    nodes[node, START] = start
                    num_active -= 1
        if is_new:
            num_active = 0
    return num_active


@compiled
def insert_response(
    nodes: Int32Array,
    slots: Uint32Array,
    text: Int32Array,
    root: int,
    active: Int32Array,
    begin: int,
    end: int,
    max_depth: int,
) -> None:
    """Take a whole text into the tree; windows that end within an edge get an end of their own there."""
    mask = text.size - 1
    num_active = extend(nodes, slots, text, wide(0), mask, root, active, wide(0), begin, end, end, max_depth)
    for start in range(end - num_active, end):
        node = wide(active[start & (active.size - 1)])
        length = end - start
        if length < nodes[node, DEPTH]:
            token = text[(nodes[node, START] + length) & mask]
            _split(nodes, slots, token, active, node, end, length)
        else:
            nodes[node, START] = start


@compiled
def _remove(nodes: Int32Array, slots: Uint32Array, node: int) -> None:
    leave(nodes, slots, node)
    free_node(nodes, node)


@compiled
def _merge(nodes: Int32Array, slots: Uint32Array, node: int, child: int) -> None:
    """Undo a split: an only child that all windows go on to takes the place of its parent."""
    parent = int(nodes[node, PARENT])
    leave(nodes, slots, child)
    take_place(nodes, parent, node, child)
    rename(nodes, slots, node, child)
    nodes[child, PARENT] = parent
    nodes[child, TOKEN] = nodes[node, TOKEN]
    free_node(nodes, node)


@compiled
def evict_response(
    nodes: Int32Array, slots: Uint32Array, text: Int32Array, root: int, begin: int, end: int, max_depth: int
) -> None:
    """Take the oldest text out of the tree: what is left is what would be there without it."""
    mask = text.size - 1
    path = np.empty(max_depth, dtype=np.int64)
    families = np.empty(nodes[0, LIVE], dtype=np.int32)  # to be searched, each once
    num_families = 0
    for start in range(begin, end):
        node, length, num_passed = root, 0, 0
        while length < min(max_depth, end - start):
            child = find(nodes, slots, node, text[(start + length) & mask])
            nodes[child, COUNT] -= 1
            path[num_passed] = child
            num_passed += 1
            if nodes[child, COUNT] > 0 and nodes[node, CHILD] == child and may_have_lost(nodes, node, child):
                families[num_families] = node
                num_families += 1
            node, length = child, nodes[child, DEPTH]
        while num_passed > 0 and nodes[path[num_passed - 1], COUNT] == 0:
            num_passed -= 1
            child = path[num_passed]
            node = int(nodes[child, PARENT])
            was_head = nodes[node, CHILD] == child
            unlink(nodes, node, child)
            _remove(nodes, slots, child)
            if was_head and may_have_lost(nodes, node, child):
                families[num_families] = node
                num_families += 1
        if num_passed > 0:
            node = path[num_passed - 1]
            child = int(nodes[node, CHILD])
            if child != 0 and nodes[child, NEXT] == 0 and nodes[child, COUNT] == nodes[node, COUNT]:
                _merge(nodes, slots, node, child)
    for index in range(num_families):
        node = int(families[index])
        if nodes[node, PARENT] > 0 and nodes[node, CHILD] != 0:
            search_head(nodes, node)


@compiled
def release_tree(nodes: Int32Array, slots: Uint32Array, root: int) -> None:
    """Free a root and all below it, children first."""
    node = root
    while True:
        while nodes[node, CHILD] != 0:
            node = int(nodes[node, CHILD])
        if node == root:
            break
        parent = int(nodes[node, PARENT])
        nodes[parent, CHILD] = nodes[node, NEXT]
        _remove(nodes, slots, node)
        node = parent
    free_node(nodes, root)
