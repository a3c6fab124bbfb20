"""A block in one pass, then the head that goes through it, guess by guess or level by level, captured.

proposers/drafting/sequential_blocks.py does the same in steps in parts.
"""

from __future__ import annotations

from torch import Tensor

from kernels.reference.likeliest_tree import NextRows
from proposers.captured.blocks import CapturedBlock
from proposers.captured.grown_trees import ChosenNodes, LikeliestNodes
from proposers.heads.sequential import SequentialBlockHead
from runner.engine.device_batch import DeviceBatch
from runner.engine.operations import take_rows


class CapturedSequentialBlock(CapturedBlock):
    head: SequentialBlockHead
    _places: tuple[Tensor, ...]  # of a step under way, [count, depth, ...] each
    _state: Tensor | None  # [rows of the last call, width], of heads that keep one

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        blocks, sequel, num_silent = self.blocks(batch), self.head.sequel, self.head.config.num_silent
        hidden, pending = blocks[:, num_silent:].flatten(0, 1), batch.last_token_ids[:, 1]
        places = sequel.places(hidden, self.head.logits(hidden, self.tile), self.tile)
        self._places = tuple(own.view(batch.count, self.depth, *own.shape[1:]) for own in places)
        self._state = sequel.first_state(blocks[:, 0] if num_silent else None, pending, self.tile)
        return self._after(0, pending)

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        return self._after(step, token_ids)

    def level_logits(self, batch: DeviceBatch, following: NextRows, level: int) -> Tensor:
        if self._state is not None:
            self._state = take_rows(self._state, following.rows)
        return self._after(level + 1, following.token_ids)

    def _after(self, place: int, token_ids: Tensor) -> Tensor:
        """Logits [rows, known] of a place behind these tokens [rows], as many of each request; the state moves on."""
        places = tuple(own[:, place] for own in self._places)
        logits, self._state = self.head.sequel.guess(place, places, self._state, token_ids, self.tile)
        if place + 1 == self.depth:  # no reference to a graph's memory is kept
            self._places, self._state = (), None
        return logits


class CapturedDynamicSequentialBlock(CapturedSequentialBlock, LikeliestNodes):
    pass


class CapturedStaticSequentialBlock(CapturedSequentialBlock, ChosenNodes):
    pass
