"""A launch's rows as tiles over block tables: how the kernels compute them, with equal bits in any company.

Where launches are padded every list has a fixed length for its bucket, so that launches of one bucket share a layout,
and a captured graph serves them all: tiles and segments are padded with empty ones, tables with the null block.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from kernels.paged_segments import PagedSegments
from kernels.reference.tree_rows import NO_BRANCH, TreeRows
from runner.engine.backend import runs_kernels
from runner.engine.bucket import Buckets, bucket
from runner.engine.forward_batch import PlannedAttention
from runner.engine.segment import Family, Segment


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedAttention:
    """What operations.paged_attention takes of a launch, beside the layer's own."""

    segments: PagedSegments
    split_keys: int | None


@dataclass(frozen=True, kw_only=True)
class PagedShape:
    """Shapes of the kernels.

    linear and, on a GPU, rows_per_tile and split_keys are part of a token's arithmetic.
    """

    rows_per_tile: int  # launch rows that share an attention tile
    split_keys: int | None  # keys of one split, at absolute positions; None = one program goes over all keys
    max_context: int  # positions there can be
    buckets: Buckets | None = None  # launches are padded, so that few graphs serve them all
    linear: int | None = 1  # rows of one product; 1: it gives a row the same bits whatever its number of rows

    @property
    def tree_tiles(self) -> dict[str, Any]:
        """Of kernels.tree_rows."""
        return {"rows_per_tile": self.rows_per_tile, "split_keys": self.split_keys}

    def tree_attention(self, rows: TreeRows, block_tables: torch.Tensor, *, max_context: int) -> PagedAttention:
        """Rows of as many trees as there are tables, one [num_trees, max_blocks]; contexts up to max_context."""
        num_rows = len(rows.positions)
        segments = PagedSegments(
            tile_segments=rows.tile_segments,
            tile_rows=rows.tile_rows,
            tile_sizes=rows.tile_sizes,
            tile_positions=rows.tile_positions,
            first_keys=rows.first_keys,
            last_keys=rows.last_keys,
            block_tables=block_tables,
            segments_per_table=num_rows // len(block_tables),
            branch_starts=rows.branch_starts,
            branch_slots=rows.branch_slots,
            max_context=max_context,
            max_tile_size=1,
            num_shared_tiles=len(rows.tile_rows) - num_rows,
        )
        return PagedAttention(segments=segments, split_keys=self.split_keys)

    def padded_rows(self, num_rows: int) -> int:
        if self.buckets is not None and self.buckets.hold(num_rows):
            return self.buckets.rows(num_rows)
        tile = self.linear or 1
        return -(-num_rows // tile) * tile

    def context_bucket(self, context: int) -> int:
        """The number of keys that launches up to this one share."""
        return max(context, min(1 << (context - 1).bit_length(), self.max_context))

    def plan(
        self,
        family: Family,
        segments: Sequence[Segment],
        positions: Sequence[int],
        *,
        num_rows: int,
        block_size: int,
        is_causal: bool,
    ) -> PlannedAttention:
        """The launch's rows as tiles, for kernels/paged_attention.py and kernels/cpu/paged_attention.py."""
        tiles: list[tuple[int, int, int, int, int]] = []  # segment, first row, rows, first position, last key
        tables: list[Sequence[int]] = []
        branches: list[tuple[int, list[int]]] = []
        row = 0
        for index, segment in enumerate(segments):
            end = segment.start + segment.num_tokens
            for first in range(segment.start, end, self.rows_per_tile):
                count = min(self.rows_per_tile, end - first)
                tiles.append((index, row, count, first, first + count - 1 if is_causal else end - 1))
                row += count
            tables.append(segment.block_table[: (end - 1) // block_size + 1])
            branches.append(
                (NO_BRANCH, [])
                if segment.branch is None
                else (segment.branch_start, segment.slots(segment.branch_start, end, block_size))
            )
        context = max(tile[4] for tile in tiles) + 1
        tile_size = max(tile[2] for tile in tiles)
        num_tiles, num_segments = len(tiles), len(segments)
        width, branch_width = max(map(len, tables)), max(len(slots) for _, slots in branches)
        buckets = self.buckets if self.buckets is not None and self.buckets.hold(num_rows) else None
        if buckets is not None:
            # A segment has rows of its own, so rows bound segments, and segments and rows bound tiles.
            least_context = min(buckets.least_context, self.max_context)
            num_segments = bucket(num_segments)
            if context <= least_context:
                num_segments = max(num_segments, buckets.least_segments)
            num_tiles = num_segments + num_rows // self.rows_per_tile
            tile_size = min(bucket(tile_size), self.rows_per_tile)
            context = self.context_bucket(max(context, least_context))
            width, branch_width = -(-context // block_size), bucket(branch_width)
        columns = [list(column) for column in zip(*tiles, strict=True)]
        lists = [
            *(_padded(column, num_tiles) for column in columns),
            [*chain.from_iterable(_padded(table, width) for table in tables)]
            + [0] * ((num_segments - len(tables)) * width),
            _padded([start for start, _ in branches], num_segments, NO_BRANCH),
            [*chain.from_iterable(_padded(slots, branch_width) for _, slots in branches)]
            + [0] * ((num_segments - len(branches)) * branch_width),
        ]

        sizes = [len(numbers) for numbers in lists]

        def assemble(uploaded: Sequence[torch.Tensor]) -> PagedAttention:
            # Neighbours in one upload, so that one conversion does for all.
            numbers = uploaded[0].as_strided((sum(sizes),), (1,))
            if runs_kernels(numbers):
                numbers = numbers.to(torch.int32)
            segments_, rows_, sizes_, positions_, last_keys_, tables_, starts_, slots_ = numbers.split_with_sizes(sizes)
            return PagedAttention(
                segments=PagedSegments(
                    tile_segments=segments_,
                    tile_rows=rows_,
                    tile_sizes=sizes_,
                    tile_positions=positions_,
                    last_keys=last_keys_,
                    block_tables=tables_.view(num_segments, width),
                    branch_starts=starts_,
                    branch_slots=slots_.view(num_segments, branch_width),
                    max_context=context,
                    max_tile_size=tile_size,
                ),
                split_keys=self.split_keys,
            )

        key: Hashable = (num_tiles, tile_size, num_segments, width, branch_width, context)
        return PlannedAttention(lists=lists, assemble=assemble, key=None if buckets is None else key)


def _padded(values: Sequence[int], length: int, filler: int = 0) -> list[int]:
    return [*values, *[filler] * (length - len(values))]
