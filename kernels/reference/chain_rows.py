"""Rows of a launch over chains of one length: their positions, the slots of their KV, and the tiles of their attention.

The requests' lengths are on the device, so what depends on them is computed there and not by the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ChainRows(NamedTuple):
    """Rows request by request.

    Those of an absent request stand at position 0, are stored in the null block, and attend to it. It holds zeros, so
    what they compute is finite: memory that nobody wrote could hold NaN, which drafters would keep.
    """

    positions: Tensor  # [num_requests * num_rows] int64
    slots: Tensor  # [num_requests * num_rows] int64: block * block_size + offset
    predicted: Tensor  # [num_requests * num_rows] int64: the position behind each row; -1 for absent requests
    tile_segments: Tensor  # [num_requests * tiles of a request] int32, as the next four: kernels/paged_segments.py
    tile_rows: Tensor
    tile_sizes: Tensor
    tile_positions: Tensor
    last_keys: Tensor


def chain_rows(
    lengths: Tensor,  # [num_requests] int64; 0: the request is absent
    block_tables: Tensor,  # [num_requests, max_blocks] int32
    *,
    offset: int,  # a request's first row stands at lengths + offset
    num_rows: int,  # of each request
    block_size: int,
    rows_per_tile: int,
) -> ChainRows:
    num_requests, max_blocks = block_tables.shape
    is_here = (lengths > 0).unsqueeze(1)
    first = torch.where(is_here, lengths.unsqueeze(1) + offset, 0)
    rows = torch.arange(num_rows, device=lengths.device)
    positions = torch.where(is_here, first + rows, 0)
    blocks = positions // block_size
    # Rows behind the last block a table can hold are nobody's: their tokens cannot be committed.
    is_stored = is_here & (blocks < max_blocks)
    block = block_tables.to(torch.int64).gather(1, blocks.clamp(max=max_blocks - 1))
    slots = torch.where(is_stored, block * block_size + positions % block_size, 0)
    firsts = torch.arange(0, num_rows, rows_per_tile, device=lengths.device)
    sizes = (num_rows - firsts).clamp(max=rows_per_tile).expand(num_requests, -1)
    requests = torch.arange(num_requests, device=lengths.device).unsqueeze(1)
    tile_positions = torch.where(is_here, first + firsts, 0)
    tiles = (
        requests.expand(-1, len(firsts)),
        requests * num_rows + firsts,
        sizes,
        tile_positions,
        tile_positions + sizes - 1,
    )
    return ChainRows(
        positions.flatten(),
        slots.flatten(),
        torch.where(is_here, positions + 1, -1).flatten(),
        *(numbers.flatten().to(torch.int32) for numbers in tiles),
    )
