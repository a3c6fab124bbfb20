"""Trees that a head grows level by level, captured (proposers/drafting/level_by_level.py): EAGLE, EAGLE-3, MTP.

A level's rows are nodes that were fed to the head; each yields candidates, of which some are the rows of the next
level. KV of fed nodes lies in scratch slots, a set for each place of the batch.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from proposers.captured.drafter import CapturedDrafts
from proposers.captured.head import CapturedHead
from proposers.trees.candidates import perturbed_on_device
from proposers.trees.choice_nodes import ChoiceNodes
from proposers.trees.growth import StaticGrowth
from proposers.trees.likeliest import Level, Tree, best, likeliest_tree
from proposers.trees.static import Choices, static_tree
from proposers.vocabularies.partial import over_target_vocabulary
from runner.engine.device_requests import DeviceBatch, in_turn
from runner.engine.paged_shape import PagedShape
from runner.engine.upload import to_device


class CapturedGrownTrees(CapturedHead):
    def __init__(self, *, scratch_slots: Tensor, **common: Any) -> None:
        """scratch_slots: [capacity, most fed nodes] int64, of each place of the batch."""
        super().__init__(mask=None, **common)
        # The first column is the pending token, which is on no node's path.
        self._slots = torch.nn.functional.pad(scratch_slots, (1, 0))

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        logits = self.first_logits(batch)
        rows = torch.full_like(batch.lengths, -1).unsqueeze(1)  # [count, num_rows]: fed nodes; -1 = the pending token
        parents = rows[:, :0]  # [count, fed nodes]: the fed node before each
        self.begin(batch)
        for depth in range(self.depth):
            positions = in_turn(batch.lengths + depth, rows.shape[1])
            logits = over_target_vocabulary(logits, self.known_tokens)
            perturbed = perturbed_on_device(logits, batch.sampling(positions), self.draft_sample_method)
            token_ids, going, width = self.grow(perturbed.view(*rows.shape, perturbed.shape[1]), depth)
            if depth + 1 < self.depth:
                before = going // width  # [count, next rows]: the row that each comes from
                num_fed = parents.shape[1]
                parents = torch.cat((parents, rows.gather(1, before)), dim=1)
                rows = torch.arange(num_fed, parents.shape[1], device=going.device).expand_as(going)
                logits = self._level_logits(batch, parents, num_fed, token_ids.gather(1, going), before, depth + 1)
        tree = self.tree()
        return CapturedDrafts(tree.token_ids, parents=tree.parents)

    @abstractmethod
    def begin(self, batch: DeviceBatch) -> None:
        """A new tree of every request."""

    @abstractmethod
    def grow(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor, int]:
        """Choose the candidates of a level, and which of them are the rows of the next one.

        logits: [count, num_rows, vocab], as perturbed_on_device makes them; candidates come highest first.
        Returns their tokens [count, num_rows * width] int64; the next rows' places among them [count, next rows] int64;
        and the width.
        """

    @abstractmethod
    def tree(self) -> Tree:
        """The nodes that are drafted."""

    def _level_logits(
        self, batch: DeviceBatch, parents: Tensor, num_fed: int, token_ids: Tensor, before: Tensor, depth: int
    ) -> Tensor:
        """Feed the nodes from num_fed on; logits [count * num_rows, known] behind them.

        before: [count, num_rows] int64, the row of the level before that each goes on from.
        """
        from kernels.tree_rows import tree_rows

        shape, cache = self.runner.shapes["decode"], self.runner.cache
        assert isinstance(shape, PagedShape) and cache is not None
        rows = tree_rows(
            batch.lengths,
            self._slots[: batch.count, : parents.shape[1] + 1].contiguous(),
            parents,
            first=num_fed + 1,
            offset=-2,  # a row is stored at the place of the token before it
            depth=depth,
            **shape.tree_tiles,
        )
        launch = batch.tree_launch(token_ids.flatten(), rows, shape)
        hidden = self._output.view(batch.count, -1, self._output.shape[1])
        hidden = hidden.gather(1, before.unsqueeze(2).expand(-1, -1, hidden.shape[2])).flatten(0, 1)
        self._output = self.head(launch, hidden, cache)
        return self.head.logits(self._output, shape.linear)


class CapturedDynamicTrees(CapturedGrownTrees):
    """The likeliest candidates of each level go on, the likeliest of all are drafted (EAGLE-2)."""

    def __init__(self, *, top_k: int, **common: Any) -> None:
        super().__init__(**common)
        self.top_k = top_k
        self._levels = list[Level]()
        self._scores = self._numbers = torch.empty(0)  # [count, num_rows]: of the rows, and their candidates' numbers

    def begin(self, batch: DeviceBatch) -> None:
        self._levels = []
        self._numbers = torch.full_like(batch.lengths, -1).unsqueeze(1)
        self._scores = torch.zeros_like(self._numbers, dtype=torch.float64)

    def grow(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor, int]:
        width = min(self.top_k, logits.shape[2])
        own, token_ids = logits.log_softmax(dim=-1).topk(width, dim=-1)
        scores = (self._scores.unsqueeze(2) + own.double().clamp(max=0.0)).flatten(1)
        num_before = sum(level.scores.shape[1] for level in self._levels)
        parents = self._numbers.unsqueeze(2).expand_as(token_ids).flatten(1)
        level = Level(token_ids=token_ids.flatten(1), scores=scores, parents=parents)
        self._levels.append(level)
        going = best(scores, self.top_k)
        self._numbers, self._scores = num_before + going, scores.gather(1, going)
        return level.token_ids, going, width

    def tree(self) -> Tree:
        return likeliest_tree(self._levels, self.num_tokens)


class CapturedStaticTrees(CapturedGrownTrees):
    """The same nodes in every step; those with children go on."""

    def __init__(self, *, choices: Choices, **common: Any) -> None:
        tree = static_tree(choices)
        super().__init__(tree_depth=max(tree.depths), **common)
        growth = StaticGrowth([tree], in_order=False)
        self._widths, self._going = list[int](), list[Tensor]()
        for _ in range(self.depth):
            self._widths.append(width := growth.width)
            going = [row * width + rank for row, rank in growth.grow(width, None)]
            self._going.append(to_device(going, torch.int64, self.runner.device))
        numbers = dict(zip(tree.paths, growth.trees()[0].numbers, strict=True))
        self._nodes = ChoiceNodes.of(choices, numbers, self.runner.device)
        self._token_ids = list[Tensor]()  # of each level's candidates

    def begin(self, batch: DeviceBatch) -> None:
        self._token_ids = []

    def grow(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor, int]:
        width = self._widths[depth]
        token_ids = logits.topk(width, dim=-1).indices.flatten(1)
        self._token_ids.append(token_ids)
        return token_ids, self._going[depth].expand(len(token_ids), -1), width

    def tree(self) -> Tree:
        return self._nodes.tree(self._token_ids)
