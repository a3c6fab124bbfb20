"""A pool of suffix tree nodes and one hash over all of them: (parent, first token of the edge) -> node.

Node 0 is the header of the pool and stands for "none". Nodes are 32 bytes, the hash costs 5 to 7 bytes a node: a slot
keeps the node's id and, in the bits that the id leaves free, a tag of its key, so that a probe reads no wrong node.
Compiled functions never allocate: `Forest.reserve` makes room before a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from proposers.lookup.suffix_compile import compiled

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
ID_BITS = 3  # bits of a slot that hold the node's id

MAX_LOAD = 0.8  # of the hash
LOAD_AFTER_GROWTH = 0.57
NODE_GROWTH = 1.125  # small, because what is reserved and not used counts as bytes per token too


@compiled
def _hash(parent: int, token: int) -> Any:
    """64 mixed bits: the upper 32 choose the slot, the lower ones are its tag."""
    bits: Any = (np.uint64(parent) << np.uint64(32)) | np.uint64(np.uint32(token))
    bits *= np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(32)
    bits *= np.uint64(0xD6E8FEB86659FD93)
    bits ^= bits >> np.uint64(32)
    return bits


@compiled
def _home(bits: Any, num_slots: int) -> Any:
    """The slot where the search for a key starts; the table may have any size."""
    return np.int64(((bits >> np.uint64(32)) * np.uint64(num_slots)) >> np.uint64(32))


@compiled
def find(nodes: Int32Array, slots: Uint32Array, parent: int, token: int) -> int:
    """The child of `parent` whose edge starts with `token`, 0 when there is none."""
    bits = _hash(parent, token)
    place = _home(bits, slots.size)
    id_bits = np.int64(nodes[0, ID_BITS])
    tag = np.int64(bits & np.uint64(0xFFFFFFFF)) << id_bits & 0xFFFFFFFF
    while True:
        slot = np.int64(slots[place])
        if slot == 0:
            return 0
        if (slot ^ tag) >> id_bits == 0:
            node = int(slot & ((1 << id_bits) - 1))
            if nodes[node, PARENT] == parent and nodes[node, TOKEN] == token:
                return node
        place += 1
        if place == slots.size:
            place = 0


@compiled
def enter(nodes: Int32Array, slots: Uint32Array, node: int) -> None:
    """Put a node into the hash under its parent and token, which nobody has there."""
    bits = _hash(nodes[node, PARENT], nodes[node, TOKEN])
    place = _home(bits, slots.size)
    while slots[place] != 0:
        place += 1
        if place == slots.size:
            place = 0
    id_bits = np.int64(nodes[0, ID_BITS])
    slots[place] = (np.int64(bits & np.uint64(0xFFFFFFFF)) << id_bits & 0xFFFFFFFF) | node


@compiled
def _place_of(nodes: Int32Array, slots: Uint32Array, node: int) -> int:
    place: int = _home(_hash(nodes[node, PARENT], nodes[node, TOKEN]), slots.size)
    id_mask = (np.int64(1) << np.int64(nodes[0, ID_BITS])) - 1
    while np.int64(slots[place]) & id_mask != node:
        place += 1
        if place == slots.size:
            place = 0
    return place


@compiled
def rename(nodes: Int32Array, slots: Uint32Array, old: int, new: int) -> None:
    """Give the key of one node to another; the tag belongs to the key and stays."""
    place = _place_of(nodes, slots, old)
    slots[place] = np.int64(slots[place]) ^ old ^ new


@compiled
def leave(nodes: Int32Array, slots: Uint32Array, node: int) -> None:
    """Take a node out of the hash; what was pushed past its slot moves back, so no mark of it stays."""
    size = slots.size
    hole = _place_of(nodes, slots, node)
    id_mask = (np.int64(1) << np.int64(nodes[0, ID_BITS])) - 1
    place = hole
    while True:
        place += 1
        if place == size:
            place = 0
        slot = np.int64(slots[place])
        if slot == 0:
            break
        other = slot & id_mask
        home = _home(_hash(nodes[other, PARENT], nodes[other, TOKEN]), size)
        # It may move into the hole unless its search starts behind the hole.
        distance = place - home if place >= home else place - home + size
        gap = place - hole if place >= hole else place - hole + size
        if distance >= gap:
            slots[hole] = slot
            hole = place
    slots[hole] = 0


@compiled
def new_node(nodes: Int32Array, parent: int, token: int, depth: int, start: int, count: int) -> int:
    node = int(nodes[0, FREE])
    if node != 0:
        nodes[0, FREE] = nodes[node, NEXT]
    else:
        node = int(nodes[0, USED])
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


@compiled
def _enter_all(nodes: Int32Array, slots: Uint32Array) -> None:
    for node in range(1, nodes[0, USED]):
        if nodes[node, PARENT] > 0:
            enter(nodes, slots, node)


class Forest:
    """The arrays of a pool and its hash. A tree is a root in it; several trees may share one pool."""

    def __init__(self) -> None:
        self.nodes: Int32Array = np.zeros((256, NUM_COLUMNS), dtype=np.int32)
        self.nodes[0, USED] = 1
        self.slots: Uint32Array = np.zeros(0, dtype=np.uint32)
        self._spare = 0  # nodes there is room for at least
        self.reserve(128)

    @property
    def num_nodes(self) -> int:
        """Nodes in use, roots included."""
        return int(self.nodes[0, LIVE])

    @property
    def num_bytes(self) -> int:
        return self.nodes.nbytes + self.slots.nbytes

    def reserve(self, num_nodes: int) -> None:
        """Room for so many nodes more. Moves the arrays: nobody else may hold on to them."""
        self._spare -= num_nodes
        if self._spare >= 0:
            return  # counted as if all that was ever reserved had been used: most calls end here
        needed = self.num_nodes + 1 + num_nodes
        if needed > len(self.nodes):
            size = max(needed, int(len(self.nodes) * NODE_GROWTH))
            self.nodes.resize((size, NUM_COLUMNS), refcheck=False)  # realloc: a large array is remapped, not copied
        if needed > MAX_LOAD * self.slots.size or len(self.nodes) > 1 << int(self.nodes[0, ID_BITS]):
            size = max(self.slots.size, int(needed / LOAD_AFTER_GROWTH))
            self.slots = np.zeros(0, dtype=np.uint32)  # the old one goes first: the nodes know all there is to know
            self.slots = np.zeros(size, dtype=np.uint32)
            self.nodes[0, ID_BITS] = int(max(len(self.nodes) * NODE_GROWTH, size)).bit_length()
            _enter_all(self.nodes, self.slots)
        self._spare = min(len(self.nodes), int(MAX_LOAD * self.slots.size)) - needed
