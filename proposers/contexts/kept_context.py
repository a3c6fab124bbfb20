"""Which part of a text its drafts attend to: the first blocks of its cache and the last ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner.engine.device_batch import DeviceBatch
from runner.engine.step_operations import kept_blocks


@dataclass(frozen=True, kw_only=True)
class KeptContext:
    num_first_blocks: int
    num_recent_tokens: int  # committed ones; what else is in the block of the first of them is kept too
    block_size: int

    def unseen_blocks(self, num_tokens: int) -> range:
        """Of a text of so many committed tokens."""
        first_recent = (num_tokens - self.num_recent_tokens) // self.block_size
        return range(self.num_first_blocks, max(self.num_first_blocks, first_recent))

    def num_kept_blocks(self, num_drafts: int) -> int:
        """That any text's rows attend to while so many tokens are drafted, of which the last one is no row."""
        num_behind = self.num_recent_tokens + num_drafts - 2  # places behind the first recent token that rows come to
        return self.num_first_blocks + -(-num_behind // self.block_size) + 1  # it stands anywhere in its block

    def of_batch(self, batch: DeviceBatch, num_drafts: int) -> DeviceBatch:
        """The batch as attention sees it while so many tokens are drafted; of unseen_blocks, on the device."""
        num_kept = min(self.num_kept_blocks(num_drafts), batch.block_tables.shape[1])
        lengths, block_tables = kept_blocks(
            batch.lengths,
            batch.block_tables,
            num_first=self.num_first_blocks,
            num_recent=self.num_recent_tokens,
            num_kept=num_kept,
            block_size=self.block_size,
        )
        max_context = min(batch.max_context, num_kept * self.block_size)
        return replace(batch, lengths=lengths, block_tables=block_tables, max_context=max_context)
