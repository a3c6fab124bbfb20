"""A launch cut into tiles of fixed shapes: how torch computes it, on the CPU with equal bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.reference.paged_attention import AttentionPlan, AttentionTiles
from runner.engine.forward_batch import PlannedAttention
from runner.engine.segment import Family, Segment


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """Shapes of products and of attention calls in torch; they are part of a token's arithmetic."""

    # Rows of one product, 1 where weights are packed; None = products of any shape, not row-invariant unless packed.
    linear: int | None
    attention: int  # rows of one attention tile
    context: int | None  # a row at position p looks at the next multiple of this; None = at as much as is convenient
    is_aligned: bool = False  # attention tiles begin at multiples of their rows, so a row's place is its own too

    def padded_rows(self, num_rows: int) -> int:
        tile = self.linear or 1
        return -(-num_rows // tile) * tile

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
        """The launch's rows as tiles, for kernels/reference/paged_attention.py."""
        tiles = _cut(segments, self, block_size, is_causal)
        tile_rows = self.attention
        output_rows = [0] * num_rows
        query_rows: list[int] = []
        query_positions: list[int] = []
        last_keys: list[int] = []
        for tile in tiles:
            rows = range(tile.first_row, tile.first_row + tile.num_rows)
            above, below = [0] * tile.place, [0] * (tile_rows - tile.place - tile.num_rows)
            first = len(query_rows) + tile.place
            output_rows[rows.start : rows.stop] = range(first, first + tile.num_rows)
            query_rows += [*above, *rows, *below]
            query_positions += [*above, *positions[rows.start : rows.stop], *below]
            last_keys += [] if is_causal else [*above, *[tile.last_key] * tile.num_rows, *below]
        groups = _groups(family, tiles, self, block_size)
        lists = [output_rows, query_rows, query_positions, last_keys]
        for group in groups:
            lists += [_padded_tables(group, block_size), *_stored_apart(group, block_size)]
        # Launch rows are the first rows of the tile: with larger tiles of products there may be more.
        is_lone_tile = len(tiles) == 1 and tiles[0].place == 0 and num_rows <= tile_rows

        def assemble(uploaded: Sequence[torch.Tensor]) -> AttentionPlan:
            output_rows_, rows_, places_, last_keys_, *of_groups = uploaded
            calls = []
            start = 0
            for index, group in enumerate(groups):
                table, apart_columns, apart_slots = of_groups[3 * index : 3 * index + 3]
                of = slice(start, start + len(group) * tile_rows)
                start = of.stop
                calls.append(
                    AttentionTiles(
                        query_rows=None if is_lone_tile and tile_rows == num_rows else rows_[of],
                        query_positions=places_[of].view(-1, tile_rows),
                        block_table=table.view(len(group), -1),
                        context=max(tile.context for tile in group),
                        contiguous_from=_contiguous_from(group[0]) if len(group) == 1 else None,
                        apart_columns=apart_columns if len(apart_columns) else None,
                        apart_slots=apart_slots,
                        last_keys=None if is_causal else last_keys_[of].view(-1, tile_rows),
                    )
                )
            return AttentionPlan(tiles=calls, output_rows=None if is_lone_tile else output_rows_)

        return PlannedAttention(lists=lists, assemble=assemble)


# Decode: K + 1 rows of the default K = 4, so that verifying costs what one token costs; five rows take a CPU a few
# percent longer than one. Prefill: 64 rows run within 15 % of an untiled product.
ROW_INVARIANT_TILES: dict[Family, TileShape] = {
    "decode": TileShape(linear=5, attention=5, context=64),
    "prefill": TileShape(linear=64, attention=64, context=64, is_aligned=True),
}
# For a CPU that ends those tiles with another kernel than it begins them with (measured: AVX2 on 2 and more threads).
SMALL_ROW_INVARIANT_TILES: dict[Family, TileShape] = {
    "decode": TileShape(linear=4, attention=4, context=64),
    "prefill": TileShape(linear=48, attention=64, context=64, is_aligned=True),
}
MAX_GATHERED_BLOCKS = 4096  # of a cache, copied side by side for one call of the attention
ANY_SHAPE_TILES: dict[Family, TileShape] = {
    "decode": TileShape(linear=None, attention=5, context=None),
    "prefill": TileShape(linear=None, attention=64, context=None),
}


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Rows of one request that share an attention tile."""

    first_row: int  # of the launch
    num_rows: int
    place: int  # of the first row in the tile; places above and below stay unfilled
    block_table: Sequence[int]  # as far as any row sees
    last_key: int  # position of it, of those that any row sees
    context: int
    apart: Sequence[tuple[int, int]]  # (position, cache slot) of keys that the block table does not lead to


def _cut(segments: Sequence[Segment], shape: TileShape, block_size: int, is_causal: bool) -> list[_Tile]:
    """Segments as tiles, short contexts first; a tile ends where the context of its rows does."""
    step = shape.context or 2**31
    tiles = []
    row = 0
    for segment in segments:
        first, end = segment.start, segment.start + segment.num_tokens
        while first < end:
            place = first % shape.attention if shape.is_aligned else 0
            last = min(first + shape.attention - place, end, (first // step + 1) * step)
            seen = last if is_causal else end
            table = segment.block_table[: (seen - 1) // block_size + 1]
            tiles.append(
                _Tile(
                    first_row=row,
                    num_rows=last - first,
                    place=place,
                    block_table=table,
                    last_key=seen - 1,
                    context=len(table) * block_size if shape.context is None else -(-seen // step) * step,
                    apart=segment.stored_apart(seen, block_size),
                )
            )
            row += last - first
            first = last
    return sorted(tiles, key=lambda tile: tile.context)


def _groups(family: Family, tiles: list[_Tile], shape: TileShape, block_size: int) -> list[list[_Tile]]:
    """Which tiles share a call of the attention.

    Tiles of generated tokens share one, as many as may be gathered at once, of one context where contexts are fixed.
    A tile of a prompt has a call of its own, so that it sees no more context than its last row does.
    """
    if family == "prefill":
        return [[tile] for tile in tiles]
    widest = tiles[-1].context
    groups: list[list[_Tile]] = []
    for tile in tiles:
        context = widest if shape.context is None else tile.context
        is_full = not groups or (len(groups[-1]) + 1) * context > MAX_GATHERED_BLOCKS * block_size
        if is_full or (shape.context is not None and groups[-1][0].context != context):
            groups.append([])
        groups[-1].append(tile)
    return groups


def _padded_tables(group: list[_Tile], block_size: int) -> list[int]:
    """Block tables of a group, one after another, padded to its context with the null block."""
    num_blocks = _num_blocks(group, block_size)
    return [block for tile in group for block in [*tile.block_table, *[0] * (num_blocks - len(tile.block_table))]]


def _stored_apart(group: list[_Tile], block_size: int) -> tuple[list[int], list[int]]:
    """Columns, over the gathered tables of a group, whose keys are stored apart, and the slots of these."""
    width = _num_blocks(group, block_size) * block_size
    pairs = [(index * width + position, slot) for index, tile in enumerate(group) for position, slot in tile.apart]
    return [column for column, _ in pairs], [slot for _, slot in pairs]


def _num_blocks(group: list[_Tile], block_size: int) -> int:
    return -(-max(tile.context for tile in group) // block_size)


def _contiguous_from(tile: _Tile) -> int | None:
    """The first block of a table whose blocks are neighbours in the cache, as they are for a lone request."""
    table = tile.block_table
    is_contiguous = not tile.apart and all(block == table[0] + index for index, block in enumerate(table))
    return table[0] if is_contiguous else None
