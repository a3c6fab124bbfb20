"""The paged KV cache: tensors on the device, and the bookkeeping of their blocks on the host.

One block table serves every model of a run: block b of the target's cache and block b of the draft's hold the
same positions of the same request. Block 0 is the null block: padding rows write there, nobody reads it unmasked.
"""

from __future__ import annotations

from collections import deque

import torch


class PagedKVCache:
    """KV of one model, a tensor a layer: [num_blocks, block_size, width], keys before values in a row."""

    def __init__(
        self, layer_widths: list[int], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeroed: a masked key contributes 0 * value, which is 0 for every finite value and NaN for garbage.
        self.layers = [torch.zeros(num_blocks, block_size, width, dtype=dtype, device=device) for width in layer_widths]
        self._slots = [layer.flatten(0, 1) for layer in self.layers]

    def write(self, layer: int, slot_mapping: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [num_rows, width] in the slots [num_rows] of one layer."""
        self._slots[layer].index_copy_(0, slot_mapping, kv)


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
