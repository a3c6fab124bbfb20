"""DSpark's drafts, captured: one pass over the block, then the sequential head, guess by guess or level by level."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.likeliest_tree import NextRows
from proposers.captured.blocks import CapturedBlock
from proposers.captured.grown_trees import ChosenNodes, LikeliestNodes
from proposers.heads.dspark import DSparkHead
from runner.engine.device_requests import DeviceBatch
from runner.engine.operations import take_rows


class CapturedDSpark(CapturedBlock):
    head: DSparkHead
    _hidden: Tensor  # of a step under way, [count, depth, hidden]
    _logits: Tensor  # [count, depth, known] float32
    _state: Tensor | None  # [rows of the last call, rank], of heads that keep one

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        blocks, markov, pending = self.blocks(batch), self.head.markov, batch.last_token_ids[:, 1]
        self._hidden = blocks[:, self.head.config.num_silent :]
        self._logits = self.head.logits(self._hidden.flatten(0, 1), self.tile).view(batch.count, self.depth, -1)
        self._state = markov.first_state(batch.count)
        if self._state is not None and self.head.config.num_silent:
            _, self._state = markov.step(self._state, blocks[:, 0], pending, self.tile)
        return self._after(batch, 0, pending)

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        return self._after(batch, step, token_ids)

    def level_logits(self, batch: DeviceBatch, following: NextRows, level: int) -> Tensor:
        if self._state is not None:
            self._state = take_rows(self._state, following.rows)
        return self._after(batch, level + 1, following.token_ids)

    def _after(self, batch: DeviceBatch, place: int, token_ids: Tensor) -> Tensor:
        """Logits [rows, known] of a place behind these tokens [rows], as many of each request; the state moves on."""
        num_each = len(token_ids) // batch.count
        markov, hidden = self.head.markov, None
        if markov.reads_hidden:
            hidden = self._hidden[:, place].repeat_interleave(num_each, dim=0, output_size=len(token_ids))
        latent, self._state = markov.step(self._state, hidden, token_ids, self.tile)
        added = markov.logits(latent, self.tile).view(batch.count, num_each, -1)
        logits = added + self._logits[:, place].unsqueeze(1)
        if place + 1 == self.depth:  # no reference to a graph's memory is kept
            self._hidden = self._logits = torch.empty(0)
            self._state = None
        return logits.flatten(0, 1)


class CapturedDynamicDSpark(CapturedDSpark, LikeliestNodes):
    pass


class CapturedStaticDSpark(CapturedDSpark, ChosenNodes):
    pass
