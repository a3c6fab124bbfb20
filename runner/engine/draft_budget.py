"""How many tokens a request may draft in a step, by the load of the moment.

Speculation pays while the machine has arithmetic to spare: the more requests share a step, the fewer drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.engine.online_budget import OnlineBudget


class DraftBudget:
    """K for a load.

    Args:
        num_speculative_tokens: K without any load; no load gives more.
        per_batch_size: [start, end, K] each, ascending: K while start..end requests run. Between two ranges and
            behind the last one the K before goes on (vLLM's num_speculative_tokens_per_batch_size).
        disable_by_batch_size: no drafts while more requests than this are running or waiting; None: no such limit.
        online: finds K while requests run, in place of the ranges.
    """

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        per_batch_size: Sequence[tuple[int, int, int]] = (),
        disable_by_batch_size: int | None = None,
        online: OnlineBudget | None = None,
    ) -> None:
        self.num_speculative_tokens, self.online = num_speculative_tokens, online
        # Where a range ends says nothing: its K goes on until the next one starts.
        self._starts = [(start, min(count, num_speculative_tokens)) for start, _, count in per_batch_size]
        self._disable_by_batch_size = disable_by_batch_size

    def max_draft_tokens(self, num_running: int, num_waiting: int) -> int:
        """Tokens a request may draft in a step that begins with this many requests."""
        if self._disable_by_batch_size is not None and num_running + num_waiting > self._disable_by_batch_size:
            return 0
        if self.online is not None:
            return self.online.max_draft_tokens(num_running)
        count = self.num_speculative_tokens
        for start, tokens in self._starts:
            if start > num_running:
                break
            count = tokens
        return count
