"""What a configuration says about drafts and load, for one engine, and what was found of it while that engine ran."""

from __future__ import annotations

from proposers.base import Proposer
from runner.config.method import MethodConfig
from runner.engine.draft_budget import DraftBudget
from runner.engine.online_budget import OnlineBudget


class DraftBudgets:
    def __init__(self, method: MethodConfig, proposer: Proposer) -> None:
        """proposer: the one that the method configures."""
        ranges, most = method.num_speculative_tokens_per_batch_size, proposer.num_speculative_tokens
        self._ranges = () if ranges is None or ranges == "auto" else ranges
        self._online = OnlineBudget(most) if ranges == "auto" and most else None
        self._proposer, self._disable_by_batch_size = proposer, method.disable_by_batch_size

    def budget(self, proposer: Proposer, max_draft_tokens: int | None) -> DraftBudget:
        """For one call's steps.

        Args:
            proposer: who drafts in them.
            max_draft_tokens: of a request in a step, set for this call, so that none is found; None: as the
                configuration says.
        """
        most = proposer.num_speculative_tokens
        return DraftBudget(
            num_speculative_tokens=most if max_draft_tokens is None else min(most, max_draft_tokens),
            per_batch_size=self._ranges,
            disable_by_batch_size=self._disable_by_batch_size,
            online=self._online if max_draft_tokens is None and proposer is self._proposer else None,
        )
