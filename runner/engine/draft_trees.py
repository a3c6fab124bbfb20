"""Shapes of draft trees: what follows from the parents alone, computed once for each list of them.

Host only, no tensors. Node j's parent is parents[j], an earlier node, or -1 for a child of the pending token, which is
the last one committed; so a chain is -1, 0, 1, ... Siblings come in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

NUM_REMEMBERED_SHAPES = 4096


def has_cousins(paths: Sequence[Sequence[int]]) -> bool:
    """Whether two nodes of one depth have children. paths: to every node."""
    return len({tuple(path[:-1]) for path in paths}) > max(map(len, paths), default=0)


@dataclass(frozen=True)
class TreeShape:
    """The tree of one request's drafts."""

    parents: tuple[int, ...]

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes from a child of the pending token to each node, itself included."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), node))
        return tuple(paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; a child of the pending token has 1."""
        return tuple(map(len, self.paths))

    @cached_property
    def places_in_level(self) -> tuple[int, ...]:
        """Of each node: its place among the nodes of its depth, in their order."""
        return tuple(self.depths[:node].count(depth) for node, depth in enumerate(self.depths))

    @property
    def depth(self) -> int:
        """Of the deepest node: the most tokens that can be accepted."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of the pending token, then of each node, [num_nodes + 1]."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def children_first(self) -> tuple[int, ...]:
        """All nodes, each behind its children, siblings in order; the pending token, -1, comes last."""
        order: list[int] = []
        going = [-1]
        while going:  # backwards: a node, then its last child
            order.append(node := going.pop())
            going += self.children[node + 1]
        return tuple(reversed(order))

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def first_path(self) -> tuple[int, ...]:
        """The first child of the pending token, its first child, and so on."""
        path: list[int] = []
        following = self.children[0]
        while following:
            path.append(following[0])
            following = self.children[following[0] + 1]
        return tuple(path)

    def runs(self, first: int = 0) -> Iterator[tuple[int, int]]:
        """Nodes from `first` on as runs [start, end): each node of a run but its first is the child of the one before.

        Depth-first order gives one run a leaf.
        """
        start = first
        for node in range(first + 1, len(self.parents) + 1):
            if node == len(self.parents) or self.parents[node] != node - 1:
                yield start, node
                start = node


@lru_cache(maxsize=NUM_REMEMBERED_SHAPES)
def _shape(parents: tuple[int, ...]) -> TreeShape:
    return TreeShape(parents)


def tree_shape(parents: Sequence[int]) -> TreeShape:
    """The shape of a list of parents; the same object for the same list, so that its parts are worked out once."""
    return _shape(tuple(parents))
