"""Consecutive tokens of one request, and where in the cache they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Family = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one request that enter one launch.

    A position's KV is stored at the place of the same number, but for those of a branch of a draft tree.
    """

    start: int  # absolute position of the first token
    num_tokens: int
    block_table: Sequence[int]
    branch_start: int = 0
    state_slot: int = 0  # as Request.state_slot
    num_drafts: int = 0  # of the tokens the last ones
    # Tokens before its end that may be taken back or computed again, and more than it has where some lie before it.
    num_uncertain: int = 0
    branch: Sequence[int] | None = None  # places of the positions branch_start, branch_start + 1, ... to the last token
    unseen_blocks: range = range(0)  # of the table: attention leaves them out; a chain's, and drafts' alone

    def as_seen(self, block_size: int) -> Segment:
        """What attention takes it for: a text without the unseen blocks, whose tokens follow one another."""
        if not self.unseen_blocks:
            return self
        table, own = self.block_table, self.unseen_blocks
        return replace(
            self,
            start=self.start - len(own) * block_size,
            block_table=[*table[: own.start], *table[own.stop :]],
            unseen_blocks=range(0),
        )

    def slots(self, first: int, end: int, block_size: int) -> list[int]:
        """Cache slots of the positions first..end-1."""
        places: Sequence[int] = range(first, end)
        if self.branch is not None:
            places = [p if p < self.branch_start else self.branch[p - self.branch_start] for p in places]
        return [self.block_table[p // block_size] * block_size + p % block_size for p in places]

    def stored_apart(self, end: int, block_size: int) -> list[tuple[int, int]]:
        """(position, cache slot) of those before `end` that are not stored at the place of their number."""
        if self.branch is None:
            return []
        own = range(self.branch_start, end)
        slots = zip(own, self.slots(own.start, own.stop, block_size), strict=True)
        return [pair for pair, place in zip(slots, self.branch, strict=False) if pair[0] != place]
