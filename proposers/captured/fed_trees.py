"""Trees whose nodes are fed to a head one level at a time, captured: EAGLE, EAGLE-3, MTP.

KV of fed nodes lies in scratch slots, a set for each place of the batch. A head without any sees none of its nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from kernels.reference.likeliest_tree import NextRows
from proposers.captured.grown_trees import CapturedGrownTrees, ChosenNodes, LikeliestNodes
from proposers.captured.head import CapturedHead
from proposers.contexts.head_keys import NumberedNodes
from runner.engine.device_batch import DeviceBatch
from runner.engine.operations import take_rows


class FedTrees(CapturedGrownTrees, CapturedHead):
    def __init__(self, **common: Any) -> None:
        super().__init__(mask=None, **common)

    @abstractmethod
    def fed(self, batch: DeviceBatch, level: int) -> NumberedNodes:
        """The nodes that were fed up to the rows that `grow` told of this level."""

    def level_logits(self, batch: DeviceBatch, following: NextRows, level: int) -> Tensor:
        launch = self.keys.level_launch(batch, following.token_ids, level + 1, partial(self.fed, batch, level))
        assert self._output is not None
        output = self.runner.compute(launch, take_rows(self._output, following.rows))
        self._output = output if level + 2 < self.depth else None  # no reference to a graph's memory is kept
        return self.head.logits(output, launch.linear_tile)


class CapturedDynamicTrees(LikeliestNodes, FedTrees):
    def __init__(self, *, scratch_slots: Tensor, **common: Any) -> None:
        """scratch_slots: [capacity, most fed nodes] int64, of each place of the batch."""
        super().__init__(**common)
        # Nodes have the numbers of candidates, of which the first top_k of a level are fed.
        levels = self.depth - 1
        fed = scratch_slots[:, : levels * self.top_k].view(len(scratch_slots), levels, self.top_k)
        self._slots = pad(pad(fed, (0, self.num_places - self.top_k)).flatten(1), (1, 0))

    def fed(self, batch: DeviceBatch, level: int) -> NumberedNodes:
        assert self.grown is not None
        first = level * self.num_places
        number = first + self.top_k
        slots, parents = self._slots[: batch.count, : number + 1], self.grown.parents.flatten(1)[:, :number]
        return NumberedNodes(slots, parents, first)


class CapturedStaticTrees(ChosenNodes, FedTrees):
    def __init__(self, *, scratch_slots: Tensor, **common: Any) -> None:
        """scratch_slots: [capacity, most fed nodes] int64, of each place of the batch."""
        super().__init__(**common)
        self._slots = pad(scratch_slots, (1, 0))

    def fed(self, batch: DeviceBatch, level: int) -> NumberedNodes:
        first, number = self.firsts[level], self.firsts[level + 1]
        parents = self.parents[:, :number].expand(batch.count, -1)
        return NumberedNodes(self._slots[: batch.count, : number + 1], parents, first)
