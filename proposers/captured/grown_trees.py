"""Trees that a drafter grows level by level, captured (proposers/drafting/level_by_level.py).

A level's rows are nodes that the drafter went on from; each yields candidates, of which some are the rows of the next
level. Which ones they are is said here; the class beside these computes their logits.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from kernels.reference.likeliest_tree import NextRows, Tree, TreeCandidates
from kernels.reference.top_candidates import Candidates
from proposers.captured.drafter import CapturedDrafts
from proposers.captured.token_by_token import CapturedChains
from proposers.trees.choice_nodes import ChoiceNodes
from proposers.trees.growth import StaticGrowth
from proposers.trees.static import Choices, static_tree
from runner.engine.device_batch import DeviceBatch
from runner.engine.operations import take_rows
from runner.engine.step_operations import add_level, likeliest_tree
from runner.engine.upload import to_device


class CapturedGrownTrees(CapturedChains):
    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        positions = batch.lengths + self.steps[: self.depth]
        logits = self.first_logits(batch)
        path: Tensor | None = None  # [count * num_rows, level] int64: the nodes on the way to each row
        self.begin(batch)
        for level in range(self.depth):
            following = self.grow(level, self.candidates(batch, logits, positions[level], self.width(level), path))
            if level + 1 < self.depth:
                logits = self.level_logits(batch, following, level)
                if batch.processors is not None:
                    fresh = following.token_ids.view(-1, 1)
                    path = fresh if path is None else torch.cat((path.index_select(0, following.rows), fresh), dim=1)
        tree = self.tree()
        return CapturedDrafts(tree.token_ids, parents=tree.parents)

    @abstractmethod
    def begin(self, batch: DeviceBatch) -> None:
        """A new tree of every request."""

    @abstractmethod
    def width(self, level: int) -> int:
        """Candidates of each of the level's rows."""

    @abstractmethod
    def grow(self, level: int, candidates: Candidates) -> NextRows:
        """Take the candidates of a level, whose rows are request by request; which of them are the next one's rows."""

    @abstractmethod
    def tree(self) -> Tree:
        """The nodes that are drafted."""

    @abstractmethod
    def level_logits(self, batch: DeviceBatch, following: NextRows, level: int) -> Tensor:
        """Go on from the rows that `grow` told of a level; logits [count * num_rows, known]."""


class LikeliestNodes(CapturedGrownTrees):
    """The likeliest candidates of each level go on, the likeliest of all are drafted (EAGLE-2)."""

    def __init__(self, *, top_k: int, **common: Any) -> None:
        super().__init__(**common)
        # Of a level as many candidates are kept as a tree may have nodes; the first top_k of them go on.
        self.top_k, self.num_places = top_k, max(top_k, self.num_tokens)
        self.grown: TreeCandidates | None = None  # so far

    def begin(self, batch: DeviceBatch) -> None:
        self.grown = TreeCandidates.unwritten(batch.count, self.depth, self.num_places, batch.lengths.device)

    def width(self, level: int) -> int:
        return self.top_k

    def grow(self, level: int, candidates: Candidates) -> NextRows:
        assert self.grown is not None
        num_rows = self.top_k if level else 1
        num_next = self.top_k if level + 1 < self.depth else 0
        return add_level(self.grown, level, *candidates, num_rows=num_rows, num_next=num_next)

    def tree(self) -> Tree:
        assert self.grown is not None
        candidates, self.grown = self.grown, None  # no reference to a graph's memory is kept
        return likeliest_tree(candidates, self.num_tokens)


class ChosenNodes(CapturedGrownTrees):
    """The same nodes in every step; those with children go on."""

    def __init__(self, *, choices: Choices, most_requests: int, **common: Any) -> None:
        """most_requests: of a batch."""
        tree = static_tree(choices)
        super().__init__(tree_depth=max(tree.depths), **common)
        growth, device = StaticGrowth([tree], in_order=[False]), self.steps.device
        places = torch.arange(most_requests, device=device).unsqueeze(1)
        self._widths, self._going, self._rows = list[int](), list[Tensor](), list[Tensor]()
        self.firsts = list[int]()  # of each level: how many nodes went on before it
        parents, first_of_rows, num_rows = list[int](), -1, 1
        for _ in range(self.depth):
            self._widths.append(width := growth.width)
            going = growth.grow(width, None)
            numbers = to_device([row * width + rank for row, rank in going], torch.int64, device)
            rows = to_device([row for row, _ in going], torch.int64, device)
            # Among the candidates, and among the rows, of all requests: [capacity, next rows].
            self._going.append(places * (num_rows * width) + numbers)
            self._rows.append(places * num_rows + rows)
            self.firsts.append(len(parents))
            before, first_of_rows = first_of_rows, len(parents)
            parents += [before + row for row, _ in going]
            num_rows = len(going)
        self.parents = to_device([parents], torch.int64, device)  # [1, nodes that go on]
        numbers_of = dict(zip(tree.paths, growth.trees()[0].numbers, strict=True))
        self._nodes = ChoiceNodes.of(choices, numbers_of, device)
        self._token_ids = list[Tensor]()  # of each level's candidates, [count, num_rows * width]
        self._count = 0

    def begin(self, batch: DeviceBatch) -> None:
        self._token_ids, self._count = [], batch.count

    def width(self, level: int) -> int:
        return self._widths[level]

    def grow(self, level: int, candidates: Candidates) -> NextRows:
        self._token_ids.append(candidates.token_ids.view(self._count, -1))
        going, rows = (own[level][: self._count].flatten() for own in (self._going, self._rows))
        return NextRows(take_rows(candidates.token_ids.view(-1, 1), going).flatten(), rows)

    def tree(self) -> Tree:
        token_ids, self._token_ids = self._token_ids, []  # no reference to a graph's memory is kept
        return self._nodes.tree(token_ids)
