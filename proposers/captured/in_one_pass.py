"""Drafters whose one pass yields the logits of every drafted place (proposers/drafting/in_one_pass.py), captured."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from proposers.captured.token_by_token import CapturedChains
from runner.engine.device_batch import DeviceBatch


class CapturedOnePass(CapturedChains):
    _logits: Tensor | None  # of a step under way, as all_logits gives them

    @abstractmethod
    def all_logits(self, batch: DeviceBatch) -> Tensor:
        """[count, num_tokens, known] float32, of every place of the drafts."""

    def first_logits(self, batch: DeviceBatch) -> Tensor:
        self._logits = self.all_logits(batch)
        return self.next_logits(batch, 0, batch.lengths)

    def next_logits(self, batch: DeviceBatch, step: int, token_ids: Tensor) -> Tensor:
        assert self._logits is not None
        logits = self._logits[:, step]
        if step + 1 == self.num_tokens:  # no reference to a graph's memory is kept
            self._logits = None
        return logits
