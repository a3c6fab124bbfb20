"""What one launch of a model computes: rows of tokens, their positions, cache slots and attention tiles.

A launch holds rows of one family only, prompt tokens (prefill) or generated tokens (decode): which arithmetic
computes a token depends on the token, never on the schedule. Rows are padded to whole tiles; padding rows read
and write the null block (block 0), whose content nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kernels.reference.paged_attention import AttentionTiles

Family = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """Rows of one product and of one attention tile; both are part of a token's arithmetic."""

    linear: int | None  # None = products of any shape, not row-invariant
    attention: int


# Decode: four rows cost a one-token step hardly more than one (measured on CPU), eight hold a request's K + 1
# rows for the usual K. Prefill: 64 rows run within 15 % of an untiled product.
ROW_INVARIANT_TILES: dict[Family, TileShape] = {
    "decode": TileShape(linear=4, attention=8),
    "prefill": TileShape(linear=64, attention=64),
}
ANY_SHAPE_TILES: dict[Family, TileShape] = {
    "decode": TileShape(linear=None, attention=8),
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
    tiles: list[AttentionTiles]
    output_rows: torch.Tensor  # [num_rows] int64: see paged_attention
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
        lengths = np.array([segment.num_tokens for segment in segments])
        starts = np.array([segment.start for segment in segments])
        first_rows = np.cumsum(lengths) - lengths  # [num_segments]
        num_tokens = int(lengths.sum())
        granule = shape.linear or 1
        num_rows = -(-num_tokens // granule) * granule

        segment_of_row = np.repeat(np.arange(len(segments)), lengths)
        offsets = np.arange(num_tokens) - first_rows[segment_of_row]  # within the segment
        positions = np.zeros(num_rows, dtype=np.int64)
        positions[:num_tokens] = starts[segment_of_row] + offsets
        tables = _padded_tables(segments, starts + lengths, block_size)
        slots = np.zeros(num_rows, dtype=np.int64)
        row_positions = positions[:num_tokens]
        slots[:num_tokens] = tables[segment_of_row, row_positions // block_size] * block_size + row_positions % block_size

        # Cut every segment into attention tiles of a fixed number of rows.
        tile_rows = shape.attention
        tiles_per_segment = -(-lengths // tile_rows)
        tile_segment = np.repeat(np.arange(len(segments)), tiles_per_segment)
        tile_index = np.arange(len(tile_segment)) - (np.cumsum(tiles_per_segment) - tiles_per_segment)[tile_segment]
        within = tile_index[:, None] * tile_rows + np.arange(tile_rows)  # [num_tiles, tile_rows] offset in segment
        filled = within < lengths[tile_segment][:, None]
        query_rows = np.where(filled, first_rows[tile_segment][:, None] + within, 0)
        query_positions = np.where(filled, starts[tile_segment][:, None] + within, 0)
        output_rows = np.zeros(num_rows, dtype=np.int64)
        output_rows[query_rows[filled]] = np.flatnonzero(filled.ravel())

        ids = np.zeros(num_rows, dtype=np.int64)
        ids[:num_tokens] = token_ids

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device, non_blocking=True)

        if family == "decode":
            groups = [slice(0, len(tile_segment))]
            num_blocks = [tables.shape[1]]
        else:  # a tile a launch, each over no more context than its last row sees
            groups = [slice(i, i + 1) for i in range(len(tile_segment))]
            num_blocks = [int(last) // block_size + 1 for last in query_positions.max(axis=1)]
        tiles = [
            AttentionTiles(
                query_rows=tensor(query_rows[group].ravel()),
                query_positions=tensor(query_positions[group]),
                block_table=tensor(tables[tile_segment[group], :blocks]),
                block_size=block_size,
            )
            for group, blocks in zip(groups, num_blocks, strict=True)
        ]
        return cls(
            family=family,
            token_ids=tensor(ids),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            tiles=tiles,
            output_rows=tensor(output_rows),
            linear_tile=shape.linear,
        )


def _padded_tables(segments: Sequence[Segment], ends: np.ndarray, block_size: int) -> np.ndarray:
    """Block tables up to each segment's last position, padded with the null block: [num_segments, max_blocks]."""
    needed = -(-ends // block_size)
    tables = np.zeros((len(segments), int(needed.max())), dtype=np.int64)
    for row, segment, count in zip(tables, segments, needed, strict=True):
        row[:count] = segment.block_table[:count]
    return tables
