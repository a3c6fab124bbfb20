"""A pool of suffix tree nodes and one hash over all of them: (parent, first token of the edge) -> node.

Node 0 is the header of the pool and stands for "none". Nodes are 32 bytes, the hash costs 5 to 9 bytes a node: a slot
keeps the node's id and, in the bits that the id leaves free, a tag of its key, so that a probe reads few wrong nodes.
The hash is an extendible one (Fagin et al., 1979): segments of fixed size, found through a directory of hash prefixes,
that split one by one as they fill. It never stops a server to rehash millions of nodes.
Compiled functions never grow the arrays: `Forest.reserve` makes room before a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cpu.compiled import compiled
from proposers.lookup.wide import wide
from runner.engine.errors import UserError

Int32Array = npt.NDArray[np.int32]
Uint32Array = npt.NDArray[np.uint32]

# Columns of a node. The edge of a node spells text[start + depth(parent) : start + depth].
PARENT = 0  # 0: a root; -1: a free node
TOKEN = 1  # first token of the edge
DEPTH = 2  # tokens from the root to the end of the edge
START = 3  # where the node's string occurred last, as a position of the text
COUNT = 4  # windows of the text that entered the edge
CHILD = 5  # the heaviest child, the last seen among equals
NEXT = 6  # next sibling, in no order; of a free node: the next free one
PREV = 7  # previous sibling; of the heaviest: a count that no sibling exceeds
NUM_COLUMNS = 8

# Columns of the header, nodes[0]
FREE = 0  # first free node
USED = 1  # nodes from here on were never used
LIVE = 2  # nodes in use, roots included
SEGMENTS = 3  # segments of the hash in use

NODE_GROWTH = 1.125  # small, because what is reserved and not used counts as bytes per token too

# The array `slots`: the segment of every hash prefix, of every segment its load and its prefix length, the segments.
ID_BITS = 27  # of a slot; the other bits are the tag
ID_MASK = (1 << ID_BITS) - 1
PREFIX_BITS = 13
NUM_PREFIXES = 1 << PREFIX_BITS
LOADS = NUM_PREFIXES
LENGTHS = 2 * NUM_PREFIXES
FIRST_SEGMENT = 3 * NUM_PREFIXES
SEGMENT_BITS = 14
SEGMENT_SIZE = 1 << SEGMENT_BITS
FULL = int(0.85 * SEGMENT_SIZE)
MAX_NODES = FULL * NUM_PREFIXES  # beyond it segments overflow, whose searches would never end; ids reach further


@compiled
def _hash(parent: int, token: int) -> int:
    """63 mixed bits: the upper ones choose the segment, the next ones the slot, the lowest are the tag."""
    bits: Any = (np.uint64(parent) << np.uint64(32)) | np.uint64(np.uint32(token))
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(32)
    bits *= np.uint64(0xD6E8FEB86659FD93)
    bits ^= bits >> np.uint64(32)
    return int(np.int64(bits >> np.uint64(1)))


@compiled
def _prefix(key: int) -> int:
    return key >> (63 - PREFIX_BITS)


@compiled
def _home(key: int) -> int:
    """Where the search for a key starts in its segment."""
    return (key >> (63 - PREFIX_BITS - SEGMENT_BITS)) & (SEGMENT_SIZE - 1)


@compiled
def _base(slots: Uint32Array, key: int) -> int:
    """Where the segment of a key starts."""
    return FIRST_SEGMENT + int(slots[_prefix(key)]) * SEGMENT_SIZE


@compiled
def find(nodes: Int32Array, slots: Uint32Array, parent: int, token: int) -> int:
    """The child of `parent` whose edge starts with `token`, 0 when there is none."""
    key = _hash(parent, token)
    base, place = _base(slots, key), _home(key)
    tag = (key << ID_BITS) & 0xFFFFFFFF
    while True:
        slot = int(slots[base + place])
        if slot == 0:
            return 0
        if (slot ^ tag) >> ID_BITS == 0:
            node = slot & ID_MASK
            if nodes[node, PARENT] == parent and nodes[node, TOKEN] == token:
                return node
        place = (place + 1) & (SEGMENT_SIZE - 1)


@compiled
def _put(slots: Uint32Array, key: int, node: int) -> None:
    base, place = _base(slots, key), _home(key)
    while slots[base + place] != 0:
        place = (place + 1) & (SEGMENT_SIZE - 1)
    slots[base + place] = ((key << ID_BITS) & 0xFFFFFFFF) | node
    slots[LOADS + int(slots[_prefix(key)])] += 1


@compiled
def _split_segment(nodes: Int32Array, slots: Uint32Array, prefix: int) -> None:
    """Move the upper half of a segment's prefixes, and what is stored under them, to a segment of its own."""
    lower, upper = int(slots[prefix]), int(nodes[0, SEGMENTS])
    nodes[0, SEGMENTS] = upper + 1
    length = int(slots[LENGTHS + lower])
    num_prefixes = 1 << (PREFIX_BITS - length)
    first = prefix & ~(num_prefixes - 1)
    for moved in range(first + num_prefixes // 2, first + num_prefixes):
        slots[moved] = upper
    slots[LENGTHS + lower] = length + 1
    slots[LENGTHS + upper] = length + 1
    slots[LOADS + lower] = 0  # of the new one it is 0
    base = FIRST_SEGMENT + lower * SEGMENT_SIZE
    stored = slots[base : base + SEGMENT_SIZE].copy()
    for place in range(base, base + SEGMENT_SIZE):
        slots[place] = 0
    for slot in stored:
        if slot != 0:
            node = int(slot) & ID_MASK
            _put(slots, _hash(nodes[node, PARENT], nodes[node, TOKEN]), node)


@compiled
def enter(nodes: Int32Array, slots: Uint32Array, node: int) -> None:
    """Put a node into the hash under its parent and token, which nobody has there."""
    key = _hash(nodes[node, PARENT], nodes[node, TOKEN])
    segment = int(slots[_prefix(key)])
    has_spare = FIRST_SEGMENT + (nodes[0, SEGMENTS] + 1) * SEGMENT_SIZE <= slots.size
    if slots[LOADS + segment] >= FULL and slots[LENGTHS + segment] < PREFIX_BITS and has_spare:
        _split_segment(nodes, slots, _prefix(key))
    _put(slots, key, node)


@compiled
def _place_of(nodes: Int32Array, slots: Uint32Array, node: int) -> int:
    """Index of the slot that holds a node."""
    key = _hash(nodes[node, PARENT], nodes[node, TOKEN])
    base, place = _base(slots, key), _home(key)
    while int(slots[base + place]) & ID_MASK != node:
        place = (place + 1) & (SEGMENT_SIZE - 1)
    return base + place


@compiled
def rename(nodes: Int32Array, slots: Uint32Array, old: int, new: int) -> None:
    """Give the key of one node to another; the tag belongs to the key and stays."""
    place = _place_of(nodes, slots, old)
    slots[place] = int(slots[place]) ^ old ^ new


@compiled
def leave(nodes: Int32Array, slots: Uint32Array, node: int) -> None:
    """Take a node out of the hash; what was pushed past its slot moves back, so no mark of it stays."""
    key = _hash(nodes[node, PARENT], nodes[node, TOKEN])
    base = _base(slots, key)
    hole = _place_of(nodes, slots, node) - base
    place = hole
    while True:
        place = (place + 1) & (SEGMENT_SIZE - 1)
        slot = int(slots[base + place])
        if slot == 0:
            break
        other = slot & ID_MASK
        home = _home(_hash(nodes[other, PARENT], nodes[other, TOKEN]))
        # It may move into the hole unless its search starts behind the hole.
        if (place - home) & (SEGMENT_SIZE - 1) >= (place - hole) & (SEGMENT_SIZE - 1):
            slots[base + hole] = slot
            hole = place
    slots[base + hole] = 0
    slots[LOADS + int(slots[_prefix(key)])] -= 1


@compiled
def new_node(nodes: Int32Array, parent: int, token: int, depth: int, start: int, count: int) -> int:
    node = wide(nodes[0, FREE])
    if node != 0:
        nodes[0, FREE] = nodes[node, NEXT]
    else:
        node = wide(nodes[0, USED])
        nodes[0, USED] = node + 1
    nodes[0, LIVE] += 1
    nodes[node, PARENT] = parent
    nodes[node, TOKEN] = token
    nodes[node, DEPTH] = depth
    nodes[node, START] = start
    nodes[node, COUNT] = count
    nodes[node, CHILD] = 0
    nodes[node, NEXT] = 0
    nodes[node, PREV] = 0
    return node


@compiled
def free_node(nodes: Int32Array, node: int) -> None:
    nodes[node, PARENT] = -1
    nodes[node, NEXT] = nodes[0, FREE]
    nodes[0, FREE] = node
    nodes[0, LIVE] -= 1


class Forest:
    """The arrays of a pool and its hash. A tree is a root in it; several trees may share one pool."""

    capacity = MAX_NODES - 1  # nodes at most, roots included; the header is one more

    def __init__(self) -> None:
        self.nodes: Int32Array = np.zeros((256, NUM_COLUMNS), dtype=np.int32)
        self.nodes[0, USED] = 1
        self.nodes[0, SEGMENTS] = 1
        self.slots: Uint32Array = np.zeros(FIRST_SEGMENT + 2 * SEGMENT_SIZE, dtype=np.uint32)
        self._spare = 0  # nodes there is room for at least
        self.reserve(128)

    @property
    def num_nodes(self) -> int:
        """Nodes in use, roots included."""
        return int(self.nodes[0, LIVE])

    @property
    def room(self) -> int:
        """Nodes that can still be reserved."""
        return self.capacity - self.num_nodes

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.slots.nbytes

    def reserve(self, num_nodes: int) -> None:
        """Room for so many nodes more. Moves the arrays: nobody else may hold on to them.

        Raises:
            UserError: the hash cannot find so many.
        """
        self._spare -= num_nodes
        if self._spare >= 0:
            return  # counted as if all that was ever reserved had been used: most calls end here
        if num_nodes > self.room:
            raise UserError(
                f"method=suffix must keep at most {self.capacity:,} tree nodes over the running requests, got "
                f"{self.num_nodes + num_nodes:,}; lower hardware.max_num_seqs"
            )
        needed = self.num_nodes + 1 + num_nodes
        if needed > len(self.nodes):
            # realloc: a large array is remapped, not copied
            self.nodes.resize((max(needed, int(len(self.nodes) * NODE_GROWTH)), NUM_COLUMNS), refcheck=False)
        # Soon enough again that no segment goes from its limit to full in between.
        self._spare = min(len(self.nodes) - needed, max(FULL // 16, needed // 32))
        num_segments = int(self.nodes[0, SEGMENTS])
        loads = self.slots[LOADS : LOADS + num_segments]
        num_segments += int(np.count_nonzero(loads >= FULL * 15 // 16)) + 2 + 2 * (num_nodes + self._spare) // FULL
        size = FIRST_SEGMENT + min(num_segments, NUM_PREFIXES) * SEGMENT_SIZE
        if size > self.slots.size:
            self.slots.resize(size, refcheck=False)
