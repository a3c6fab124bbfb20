"""Drafters with KV of their own, in blocks of the target's block tables: a place for each of its tokens."""

from __future__ import annotations

from proposers.drafting.token_by_token import TokenByTokenProposer
from runner.engine.paged_runner import PagedRunner
from runner.engine.request import Request


class OwnCacheProposer(TokenByTokenProposer):
    runner: PagedRunner

    @property
    def cache_bytes_per_block(self) -> int:
        return self.runner.cache_bytes_per_block

    def allocate_cache(self, num_blocks: int) -> None:
        self.runner.allocate_cache(num_blocks)

    def fills_blocks(self, request: Request) -> bool:
        return self.follows(request)
