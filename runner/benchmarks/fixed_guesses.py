"""A proposer that costs nothing, for measuring what remains of a step: method=custom_class takes it by its path."""

from __future__ import annotations

import torch

from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from proposers.captured.drafter import CapturedDrafter, CapturedDrafts
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule

TOKEN_ID = 1


class FixedGuesses(Proposer):
    """The same token for every place; guesses of one shape are made once."""

    def __init__(self, *, num_speculative_tokens: int, context: ProposerContext) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self._made: dict[tuple[int, ...], DraftTokens] = {}

    def propose(self, schedule: Schedule) -> DraftTokens:
        counts = tuple(item.max_draft_tokens for item in schedule.decoding)
        if counts not in self._made:
            guesses = [[TOKEN_ID] * count for count in counts]
            self._made[counts] = draft_tokens_from_lists(guesses, self.context.device)
        return self._made[counts]

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter:
        return _CapturedGuesses(num_tokens)


class _CapturedGuesses(CapturedDrafter):
    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        shape = (batch.count, self.num_tokens)
        return CapturedDrafts(torch.full(shape, TOKEN_ID, dtype=torch.int64, device=batch.lengths.device))
