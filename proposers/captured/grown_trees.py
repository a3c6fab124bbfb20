"""Trees that a head grows level by level, captured (proposers/drafting/level_by_level.py): EAGLE, EAGLE-3, MTP.

A level's rows are nodes that were fed to the head; each yields candidates, of which some are the rows of the next
level. KV of fed nodes lies in scratch slots, a set for each place of the batch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.reference.likeliest_tree import NextRows, Tree, TreeCandidates
from kernels.reference.top_candidates import Candidates
from proposers.captured.drafter import CapturedDrafts
from proposers.captured.head import CapturedHead
from proposers.trees.choice_nodes import ChoiceNodes
from proposers.trees.growth import StaticGrowth
from proposers.trees.static import Choices, static_tree
from runner.engine.device_requests import DeviceBatch
from runner.engine.operations import take_rows
from runner.engine.step_operations import add_level, likeliest_tree, tree_rows
from runner.engine.upload import to_device


class NumberedNodes(NamedTuple):
    """Nodes under the numbers that the fed ones among them have; there may be others."""

    slots: Tensor  # [count, 1 + number] int64: where KV lies; the first column is the pending token's
    parents: Tensor  # [count, number] int64: an earlier node, -1 = the pending token
    first: int  # number of the level's first row; its last row's is the last of all


class CapturedGrownTrees(CapturedHead):
    def __init__(self, **common: Any) -> None:
        super().__init__(mask=None, **common)

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        positions = batch.lengths + self.steps[: self.depth]
        logits = self.first_logits(batch)
        path: Tensor | None = None  # [count * num_rows, level] int64: the nodes on the way to each row
        self.begin(batch)
        for level in range(self.depth):
            following = self.grow(level, self.candidates(batch, logits, positions[level], self.width(level), path))
            if level + 1 < self.depth:
                logits = self._level_logits(batch, following, level)
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
    def fed(self, batch: DeviceBatch, level: int) -> NumberedNodes:
        """The nodes that were fed up to the rows that `grow` told of this level."""

    @abstractmethod
    def tree(self) -> Tree:
        """The nodes that are drafted."""

    def _level_logits(self, batch: DeviceBatch, following: NextRows, level: int) -> Tensor:
        """Feed the rows behind a level; logits [count * num_rows, known]."""
        shape, nodes = self.runner.paged_shape, self.fed(batch, level)
        rows = tree_rows(
            batch.lengths,
            nodes.slots,
            nodes.parents,
            first=nodes.first + 1,
            offset=-2,  # a row is stored at the place of the token before it
            depth=level + 1,
            **shape.tree_tiles,
        )
        launch = batch.tree_launch(following.token_ids, rows, shape)
        self._output = self.runner.compute(launch, take_rows(self._output, following.rows))
        return self.head.logits(self._output, shape.linear)


class CapturedDynamicTrees(CapturedGrownTrees):
    """The likeliest candidates of each level go on, the likeliest of all are drafted (EAGLE-2)."""

    def __init__(self, *, top_k: int, scratch_slots: Tensor, **common: Any) -> None:
        """scratch_slots: [capacity, most fed nodes] int64, of each place of the batch."""
        super().__init__(**common)
        self.top_k, self.num_places = top_k, max(top_k, self.num_tokens)
        # Nodes have the numbers of candidates, of which the first top_k of a level are fed.
        fed = scratch_slots[:, : (self.depth - 1) * top_k].view(len(scratch_slots), self.depth - 1, top_k)
        self._slots = pad(pad(fed, (0, self.num_places - top_k)).flatten(1), (1, 0))
        self._tree: TreeCandidates | None = None

    def begin(self, batch: DeviceBatch) -> None:
        self._tree = TreeCandidates.unwritten(batch.count, self.depth, self.num_places, batch.lengths.device)

    def width(self, level: int) -> int:
        return self.top_k

    def grow(self, level: int, candidates: Candidates) -> NextRows:
        assert self._tree is not None
        num_rows = self.top_k if level else 1
        num_next = self.top_k if level + 1 < self.depth else 0
        return add_level(self._tree, level, *candidates, num_rows=num_rows, num_next=num_next)

    def fed(self, batch: DeviceBatch, level: int) -> NumberedNodes:
        assert self._tree is not None
        first = level * self.num_places
        number = first + self.top_k
        slots, parents = self._slots[: batch.count, : number + 1], self._tree.parents.flatten(1)[:, :number]
        return NumberedNodes(slots, parents, first)

    def tree(self) -> Tree:
        assert self._tree is not None
        candidates, self._tree = self._tree, None  # no reference to a graph's memory is kept
        return likeliest_tree(candidates, self.num_tokens)


class CapturedStaticTrees(CapturedGrownTrees):
    """The same nodes in every step; those with children go on."""

    def __init__(self, *, choices: Choices, scratch_slots: Tensor, **common: Any) -> None:
        """scratch_slots: [capacity, most fed nodes] int64, of each place of the batch."""
        tree = static_tree(choices)
        super().__init__(tree_depth=max(tree.depths), **common)
        self._slots = pad(scratch_slots, (1, 0))
        growth, device = StaticGrowth([tree], in_order=False), self.runner.device
        places = torch.arange(self._capacity, device=device).unsqueeze(1)
        self._widths, self._going, self._rows, self._firsts = list[int](), list[Tensor](), list[Tensor](), list[int]()
        parents, first_of_rows, num_rows = list[int](), -1, 1
        for _ in range(self.depth):
            self._widths.append(width := growth.width)
            going = growth.grow(width, None)
            numbers = to_device([row * width + rank for row, rank in going], torch.int64, device)
            rows = to_device([row for row, _ in going], torch.int64, device)
            # Among the candidates, and among the rows, of all requests: [capacity, next rows].
            self._going.append(places * (num_rows * width) + numbers)
            self._rows.append(places * num_rows + rows)
            self._firsts.append(len(parents))
            before, first_of_rows = first_of_rows, len(parents)
            parents += [before + row for row, _ in going]
            num_rows = len(going)
        self._parents = to_device([parents], torch.int64, device)
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

    def fed(self, batch: DeviceBatch, level: int) -> NumberedNodes:
        first, number = self._firsts[level], self._firsts[level + 1]
        parents = self._parents[:, :number].expand(batch.count, -1)
        return NumberedNodes(self._slots[: batch.count, : number + 1], parents, first)

    def tree(self) -> Tree:
        return self._nodes.tree(self._token_ids)
