"""DFlash's drafts, captured: the logits of all places come of one pass."""

from __future__ import annotations

from torch import Tensor

from proposers.captured.blocks import CapturedBlock
from proposers.captured.in_one_pass import CapturedOnePass
from runner.engine.device_batch import DeviceBatch


class CapturedDFlash(CapturedBlock, CapturedOnePass):
    def all_logits(self, batch: DeviceBatch) -> Tensor:
        guessing = self.blocks(batch)[:, self.head.config.num_silent :].flatten(0, 1)
        return self.head.logits(guessing, self.tile).view(batch.count, self.num_tokens, -1)
