"""What a launch of kernels/paged_attention.py attends to: its rows in tiles, and where their keys are stored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedSegments:
    """Tiles of a launch, all on the device: padded entries do nothing, so a captured launch serves any smaller batch.

    Numbers are int32; those of a CPU's kernels may be int64.
    Rows of a tile follow one another, in the launch and in their segment. Rows in no tile keep what their output's
    memory held, on a CPU zeros.
    """

    tile_segments: Tensor  # [num_tiles]: segment a tile's rows belong to
    tile_rows: Tensor  # [num_tiles]: first launch row of a tile
    tile_sizes: Tensor  # [num_tiles]: its rows, at most rows_per_tile(...); 0 = padding
    tile_positions: Tensor  # [num_tiles]: absolute position of its first row
    last_keys: Tensor  # [num_tiles]: position of the last key that any row sees; not causal: that every row sees
    block_tables: Tensor  # [num_segments / segments_per_table, max_blocks]
    branch_starts: Tensor  # [num_segments]: positions from here on are stored in branch_slots; 2**31 - 1: none
    branch_slots: Tensor  # [num_segments, max_branch]: cache slot of position branch_start + i
    max_context: int  # every visible key lies before this position; on the host, for the grid
    max_tile_size: int  # largest of tile_sizes, shared tiles aside; on the host, for the grid
    # The first num_shared_tiles tiles attend to keys that all of their rows see: whole splits, up to last_keys. Each of
    # these rows is in a tile of its own too, which attends to the rest, from first_keys on. Under a sliding window the
    # rows do not begin at one key, so shared tiles are skipped and the rows' own tiles attend to all that they see.
    num_shared_tiles: int = 0
    first_keys: Tensor | None = None  # [num_tiles]; None: 0
    segments_per_table: int = 1  # neighbours that share a block table

    by_shape: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # kernels/cpu/paged_attention.py's

    @cached_property
    def own_tiles(self) -> PagedSegments:
        """Without the shared tiles; cut once for all layers of a launch."""
        if self.num_shared_tiles == 0:
            return self
        names = ("tile_segments", "tile_rows", "tile_sizes", "tile_positions", "last_keys")
        own = {name: getattr(self, name)[self.num_shared_tiles :] for name in names}
        return replace(self, **own, num_shared_tiles=0, first_keys=None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What kernels/cpu/paged_attention.py reads."""
        tiles = (self.tile_segments, self.tile_rows, self.tile_sizes, self.tile_positions, self.last_keys)
        return (*tiles, self.block_tables, self.branch_starts, self.branch_slots)
