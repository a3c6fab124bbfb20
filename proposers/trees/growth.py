"""Trees that grow level by level: which candidates are fed to the drafter for the next level, which are drafted.

Host only, over all requests of a step at once. A level has rows, of which each yields `width` candidates by rank; the
candidate of rank k of row r has the number offset + r * width + k, with the offset behind the levels before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from proposers.trees.draft_tree import depth_first
from proposers.trees.rank_tree import RankTree
from runner.engine.draft_trees import tree_shape


@dataclass(frozen=True)
class GrownTree:
    """One request's drafts; parents come before children."""

    parents: list[int]  # -1 = the pending token
    numbers: list[int]  # of each node among the candidates of all levels

    def depth_first(self) -> GrownTree:
        """The same tree, its nodes in depth-first order; siblings keep their order."""
        order, parents = depth_first(self.parents)
        return GrownTree(parents, [self.numbers[node] for node in order])


class Growth(ABC):
    """Starts with a row for each request, its pending token."""

    needs_scores: bool  # whether `grow` reads log-probabilities

    def __init__(self, num_requests: int) -> None:
        self._rows = [(request, -1) for request in range(num_requests)]  # of the level: (request, node or -1)
        self._offset = 0

    @property
    def owners(self) -> list[int]:
        """The request of each row of the level."""
        return [request for request, _ in self._rows]

    @property
    @abstractmethod
    def width(self) -> int:
        """Candidates that the level needs of each row."""

    @property
    @abstractmethod
    def depths(self) -> list[int]:
        """Levels of each request's tree, at most; known before anything has grown."""

    @abstractmethod
    def grow(self, width: int, scores: list[list[float]] | None) -> list[tuple[int, int]]:
        """Take the level's candidates; returns (row, rank) of those that are the rows of the next level.

        scores: [num_rows, width], the log-probability of each candidate given its row; None unless needed.
        """

    @abstractmethod
    def trees(self) -> list[GrownTree]:
        """What is drafted, one for each request; where nodes are chosen by their scores, the likeliest come first."""


class StaticGrowth(Growth):
    """The same tree in every step; nodes with children go on."""

    needs_scores = False

    def __init__(self, trees: Sequence[RankTree], *, in_order: Sequence[bool]) -> None:
        """in_order: of each tree, whether its children are the first candidates whatever their ranks, as probs of drawn
        candidates require."""
        super().__init__(len(trees))
        self._trees = trees
        self._in_order = in_order
        self._numbers = [[0] * tree.num_nodes for tree in trees]

    @property
    def width(self) -> int:
        return max(1 + rank for row in self._rows for _, rank in self._children(*row))

    @property
    def depths(self) -> list[int]:
        return [tree_shape(tree.parents).depth for tree in self._trees]

    def grow(self, width: int, scores: list[list[float]] | None) -> list[tuple[int, int]]:
        going: list[tuple[int, int]] = []
        rows: list[tuple[int, int]] = []
        for row, (request, node) in enumerate(self._rows):
            for child, rank in self._children(request, node):
                self._numbers[request][child] = self._offset + row * width + rank
                if tree_shape(self._trees[request].parents).children[child + 1]:
                    going.append((row, rank))
                    rows.append((request, child))
        self._offset += len(self._rows) * width
        self._rows = rows
        return going

    def trees(self) -> list[GrownTree]:
        return [
            GrownTree(list(tree.parents), numbers) for tree, numbers in zip(self._trees, self._numbers, strict=True)
        ]

    def _children(self, request: int, node: int) -> list[tuple[int, int]]:
        """(node, rank among the candidates) of a node's children."""
        tree = self._trees[request]
        children = tree_shape(tree.parents).children[node + 1]
        return [
            (child, place if self._in_order[request] else tree.ranks[child]) for place, child in enumerate(children)
        ]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    score: float  # log-probability of the path; of greedy requests a sharpened one (RowSampling.candidates)
    number: int
    parent: int  # place among the request's candidates; -1 = the pending token


class DynamicGrowth(Growth):
    """The candidates of the highest scores (EAGLE-2, arXiv 2406.16858).

    At each level the top_k candidates of the highest joint score go on; in the end the best num_nodes of all
    levels are drafted. A child is no likelier than its parent, so that they are a tree.
    """

    needs_scores = True

    def __init__(
        self,
        num_nodes: Sequence[int],  # of each request
        *,
        depth: int,
        top_k: Sequence[int],  # of each request
    ) -> None:
        super().__init__(len(num_nodes))
        self._num_nodes, self._depth, self._top_k = num_nodes, depth, top_k
        self._found: list[list[_Candidate]] = [[] for _ in num_nodes]
        self._level = 0

    @property
    def width(self) -> int:
        return max(self._top_k[request] for request in self.owners)

    @property
    def depths(self) -> list[int]:
        return [min(count, self._depth) for count in self._num_nodes]

    def grow(self, width: int, scores: list[list[float]] | None) -> list[tuple[int, int]]:
        assert scores is not None, "the shape follows from probabilities"
        self._level += 1
        fresh: dict[int, list[tuple[float, int, int]]] = {}  # request -> (-score, number, place) of this level
        for row, (request, parent) in enumerate(self._rows):
            found = self._found[request]
            before = found[parent].score if parent >= 0 else 0.0
            for rank, score in enumerate(scores[row][: self._top_k[request]]):
                if score > -math.inf:
                    joint, number = before + min(score, 0.0), self._offset + row * width + rank
                    fresh.setdefault(request, []).append((-joint, number, len(found)))
                    found.append(_Candidate(score=joint, number=number, parent=parent))
        going: list[tuple[int, int]] = []
        rows: list[tuple[int, int]] = []
        depths = self.depths
        for request, candidates in fresh.items():
            if self._level < depths[request]:
                best = sorted(candidates)[: self._top_k[request]]
                going += [divmod(number - self._offset, width) for _, number, _ in best]
                rows += [(request, place) for _, _, place in best]
        self._offset += len(self._rows) * width
        self._rows = rows
        return going

    def trees(self) -> list[GrownTree]:
        return [_best(found, count) for found, count in zip(self._found, self._num_nodes, strict=True)]


def _best(found: list[_Candidate], num_nodes: int) -> GrownTree:
    # Of equals the earlier one, so that parents come before their children.
    places = sorted(range(len(found)), key=lambda place: (-found[place].score, place))[:num_nodes]
    node_of = {place: node for node, place in enumerate(places)} | {-1: -1}
    return GrownTree([node_of[found[place].parent] for place in places], [found[place].number for place in places])
