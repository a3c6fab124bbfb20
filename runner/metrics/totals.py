"""Totals over requests: what is left of a call of generate() when its records are let go of."""

from __future__ import annotations

from collections.abc import Iterable

from runner.metrics.records import RequestRecord


class RequestTotals:
    """Running totals of drafts and of the prefix cache.

    `num_accepted_at[i]` counts the drafts whose token i was accepted, up to the deepest draft.
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_at: list[int] = []
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens

    def add(self, records: Iterable[RequestRecord]) -> None:
        for record in records:
            if record.num_cached_tokens is not None:
                self.prefix_cache_queries += len(record.prompt_token_ids)
                self.prefix_cache_hits += record.num_cached_tokens
            for drafted, depth, accepted in record.drafts:
                self.num_drafts += 1
                self.num_draft_tokens += drafted
                self.num_accepted_tokens += accepted
                self.num_accepted_at += [0] * (depth - len(self.num_accepted_at))
                for position in range(accepted):
                    self.num_accepted_at[position] += 1
