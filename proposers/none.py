"""No speculation: plain decoding, which is verification of zero drafts."""

from __future__ import annotations

from proposers.base import Proposer
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule


class NoneProposer(Proposer):
    def propose(self, schedule: Schedule) -> DraftTokens:
        return DraftTokens.empty(len(schedule.decoding), self.context.device)
