"""Proposers that cost nothing, for measuring what remains of a step: method=custom_class takes them by their path."""

from __future__ import annotations

from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from runner.engine.request import DraftTokens
from runner.engine.scheduler import Schedule

TOKEN_ID = 1


class FixedGuesses(Proposer):
    """The same token for every place; guesses of one shape are made once."""

    def __init__(self, *, num_speculative_tokens: int, context: ProposerContext) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self._made: dict[tuple[int, ...], DraftTokens] = {}

    def propose(self, schedule: Schedule) -> DraftTokens:
        return self._guess(tuple(item.max_draft_tokens for item in schedule.decoding))

    def _guess(self, counts: tuple[int, ...]) -> DraftTokens:
        if counts not in self._made:
            guesses = [[TOKEN_ID] * count for count in counts]
            self._made[counts] = draft_tokens_from_lists(guesses, self.context.device)
        return self._made[counts]


class EverySecondStep(FixedGuesses):
    """Guesses in every second step, so that verifying and plain steps take turns in one text."""

    _guesses_now = False

    def propose(self, schedule: Schedule) -> DraftTokens:
        self._guesses_now = not self._guesses_now
        if self._guesses_now:
            return super().propose(schedule)
        return self._guess((0,) * len(schedule.decoding))
