"""Whose the blocks of the paged KV cache are: bookkeeping on the host. Knows no tensor."""

from __future__ import annotations

from collections import deque


class BlockManager:
    """Hands out physical blocks 1..num_blocks-1; first in, first out, so a leak shows early."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be >= 2 (block 0 is reserved), got {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = deque(range(1, num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extend block_table to hold num_tokens; False, and nothing changed, when too few blocks are free."""
        missing = self.num_blocks_for(num_tokens) - len(block_table)
        if missing > len(self._free):
            return False
        block_table.extend(self._free.popleft() for _ in range(missing))
        return True

    def release(self, block_table: list[int]) -> None:
        self._free.extend(block_table)
        block_table.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Every block is free or owned, exactly once."""
        owned = [block for table in tables for block in table]
        counted = sorted([*self._free, *owned])
        assert counted == list(range(1, self.num_blocks)), "a KV block leaked or is owned twice"
