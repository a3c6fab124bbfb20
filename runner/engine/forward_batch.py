"""What one launch of a model computes: rows of tokens, their positions, cache slots and attention tiles.

A launch holds rows of one family only, prompt tokens (prefill) or generated tokens (decode): which arithmetic
computes a token depends on the token, never on the schedule. Rows are padded to whole tiles; padding rows read
and write the null block (block 0), whose content nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.reference.paged_attention import AttentionPlan, AttentionTiles

Family = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """Rows of one product and of one attention tile; both are part of a token's arithmetic."""

    linear: int | None  # None = products of any shape, not row-invariant
    attention: int


# Decode: K + 1 rows of the default K = 4, so that verifying costs what one token costs; five rows take a CPU a few
# percent longer than one. Prefill: 64 rows run within 15 % of an untiled product.
ROW_INVARIANT_TILES: dict[Family, TileShape] = {
    "decode": TileShape(linear=5, attention=5),
    "prefill": TileShape(linear=64, attention=64),
}
MAX_GATHERED_BLOCKS = 4096  # of a cache, copied side by side for one call of the attention
ANY_SHAPE_TILES: dict[Family, TileShape] = {
    "decode": TileShape(linear=None, attention=5),
    "prefill": TileShape(linear=None, attention=64),
}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one request that enter one launch."""

    start: int  # absolute position of the first token
    num_tokens: int
    block_table: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One launch. Rows of a segment are consecutive, segments in the order given, padding rows last."""

    family: Family
    token_ids: torch.Tensor  # [num_rows] int64
    positions: torch.Tensor  # [num_rows] int64
    slot_mapping: torch.Tensor  # [num_rows] int64: cache slot each row's KV is written to
    attention: AttentionPlan
    linear_tile: int | None

    @classmethod
    def build(
        cls,
        family: Family,
        segments: Sequence[Segment],
        token_ids: Sequence[int],  # of all segments, concatenated; placeholders may be overwritten on the device
        *,
        shape: TileShape,
        block_size: int,
        device: torch.device,
    ) -> ForwardBatch:
        granule = shape.linear or 1
        padding = [0] * (-len(token_ids) % granule)
        num_rows, tile_rows = len(token_ids) + len(padding), shape.attention
        positions: list[int] = []
        slots: list[int] = []
        output_rows: list[int] = []
        query_rows: list[int] = []
        query_positions: list[int] = []
        tables: list[Sequence[int]] = []  # a tile's, as far as its last row sees
        for segment in segments:
            end = segment.start + segment.num_tokens
            for first in range(segment.start, end, tile_rows):
                places = range(first, min(first + tile_rows, end))
                unfilled = [0] * (tile_rows - len(places))
                output_rows += range(len(query_rows), len(query_rows) + len(places))
                query_rows += [*range(len(positions), len(positions) + len(places)), *unfilled]
                query_positions += [*places, *unfilled]
                positions += places
                slots += [segment.block_table[p // block_size] * block_size + p % block_size for p in places]
                tables.append(segment.block_table[: places[-1] // block_size + 1])
        groups = _groups(family, tables)
        # One upload for everything the launch needs to know, then views of it.
        lists = [[*token_ids, *padding], positions + padding, slots + padding, output_rows + padding]
        lists += [query_rows, query_positions, *(table for _, table in groups)]
        packed = torch.tensor([number for numbers in lists for number in numbers]).to(device, non_blocking=True)
        ids, positions_, slots_, output_rows_, rows_, places_, *tables_ = packed.split_with_sizes(
            [len(part) for part in lists]
        )
        is_lone_tile = len(tables) == 1 and tile_rows == num_rows  # launch rows and tile rows are the same
        tiles = [
            AttentionTiles(
                query_rows=None if is_lone_tile else rows_[of.start * tile_rows : of.stop * tile_rows],
                query_positions=places_[of.start * tile_rows : of.stop * tile_rows].view(-1, tile_rows),
                block_table=table.view(len(of), -1),
                block_size=block_size,
                contiguous_from=_contiguous_from(numbers) if len(of) == 1 else None,
            )
            for (of, numbers), table in zip(groups, tables_, strict=True)
        ]
        return cls(
            family=family,
            token_ids=ids,
            positions=positions_,
            slot_mapping=slots_,
            attention=AttentionPlan(tiles=tiles, output_rows=None if is_lone_tile else output_rows_),
            linear_tile=shape.linear,
        )


def _groups(family: Family, tables: list[Sequence[int]]) -> list[tuple[range, list[int]]]:
    """Which tiles share a call of the attention, and their block tables, flat and padded with the null block.

    Tiles of generated tokens share a call, as many as may be gathered at once. A tile of a prompt has one of its own,
    so that it sees no more context than its last row does.
    """
    if family == "prefill":
        return [(range(tile, tile + 1), list(table)) for tile, table in enumerate(tables)]
    widest = max(len(table) for table in tables)
    together = max(1, MAX_GATHERED_BLOCKS // widest)
    groups = []
    for start in range(0, len(tables), together):
        group = tables[start : start + together]
        blocks = [block for table in group for block in [*table, *[0] * (widest - len(table))]]
        groups.append((range(start, start + len(group)), blocks))
    return groups


def _contiguous_from(table: Sequence[int]) -> int | None:
    """The first block of a table whose blocks are neighbours in the cache, as they are for a lone request."""
    return table[0] if all(block == table[0] + index for index, block in enumerate(table)) else None
