"""Whose the blocks of the paged KV cache are: bookkeeping on the host. Knows no tensor.

A block may have several owners, requests whose prompts begin alike, and keeps its contents when the last one lets go:
it is taken for something else only when no other is free, the one that was let go of first before the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence


class BlockManager:
    """Hands out physical blocks 1..num_blocks-1; first in, first out, so a leak shows early."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be >= 2 (block 0 is reserved), got {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reset()

    def reset(self) -> None:
        """As at the start: nobody has a block, and nothing is known of what is in them."""
        self._free = deque(range(1, self.num_blocks))  # what is in them is of no use to anybody
        self._unowned: dict[int, None] = {}  # of use and nobody's, in the order in which they were let go of
        self._num_owners = [0] * self.num_blocks
        self._block_of: dict[bytes, int] = {}  # by the key of what is in it
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._unowned)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extend block_table to hold num_tokens; False, and nothing changed, when too few blocks are free."""
        missing = self.num_blocks_for(num_tokens) - len(block_table)
        if missing > self.num_free_blocks:
            return False
        block_table.extend(self._take() for _ in range(missing))
        return True

    def release(self, block_table: list[int]) -> None:
        """Let go of a request's blocks, of its last one first: it is of use only where those before it are."""
        while block_table:  # one by one: an interrupted release goes on where it was
            block = block_table.pop()
            self._num_owners[block] -= 1
            if self._num_owners[block] > 0:
                continue
            if block in self._key_of:
                self._unowned[block] = None
            else:
                self._free.append(block)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks with these contents, up to the first that is not there."""
        found = list[int]()
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_unowned(self, blocks: Sequence[int]) -> int:
        """How many of these count as free as long as nobody shares them."""
        return sum(self._num_owners[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int], block_table: list[int]) -> None:
        """Begin a request's table with blocks that `find` found just now."""
        for block in blocks:
            self._unowned.pop(block, None)
            self._num_owners[block] += 1
            block_table.append(block)

    def keep(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """What is in these blocks is complete, and known by these keys; where another block has it too, that one is."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key], self._key_of[block] = block, key

    def forget(self) -> None:
        """Nothing that is in the blocks now is of use to another request."""
        self._block_of.clear()
        self._key_of.clear()
        self._free.extend(self._unowned)
        self._unowned.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Every block is free, or owned by those who have it in their tables; what is known is where it should be."""
        owners = Counter(block for table in tables for block in table)
        counted = sorted([*self._free, *self._unowned, *owners])
        assert counted == list(range(1, self.num_blocks)), "a KV block leaked, or is free and owned"
        known_owners = {block: count for block, count in enumerate(self._num_owners) if count}
        assert known_owners == owners, "a KV block has more owners than are known, or fewer"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "a KV block has another's key"
        assert self._key_of.keys() >= self._unowned.keys(), "a KV block is kept and cannot be found"

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block = next(iter(self._unowned))
            del self._unowned[block], self._block_of[self._key_of.pop(block)]
        self._num_owners[block] = 1
        return block
