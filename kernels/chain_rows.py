"""kernels/reference/chain_rows.py in one launch: a program for each request."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.chain_rows import ChainRows
from kernels.sizes import cdiv, next_power_of_2


@Kernel
@triton.jit(
    do_not_specialize=["offset", "max_blocks", "table_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "tables_ptr"],
)
def chain_rows_kernel(
    rows_ptr,  # [3, num_requests * num_rows] int64: positions, slots, predicted
    tiles_ptr,  # [5, num_requests * num_tiles] int32: segments, rows, sizes, positions, last keys
    lengths_ptr,  # [num_requests] int64
    tables_ptr,  # [num_requests, max_blocks] int32, rows table_stride apart
    offset,
    max_blocks,
    table_stride,
    NUM_ROWS: tl.constexpr,  # of each request
    NUM_TILES: tl.constexpr,  # likewise
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # >= NUM_ROWS and NUM_TILES
):
    request = tl.program_id(0)
    all_rows, all_tiles = tl.num_programs(0) * NUM_ROWS, tl.num_programs(0) * NUM_TILES
    length = tl.load(lengths_ptr + request)
    is_here = length > 0
    first = tl.where(is_here, length + offset, 0)
    place = tl.arange(0, ROWS)
    is_row, is_tile = place < NUM_ROWS, place < NUM_TILES

    position = tl.where(is_here, first + place, 0)
    block = position // BLOCK_SIZE
    is_stored = is_row & is_here & (block < max_blocks)
    table_ptr = tables_ptr + request.to(tl.int64) * table_stride
    slot = tl.load(table_ptr + block, mask=is_stored, other=0).to(tl.int64) * BLOCK_SIZE
    slot += tl.where(is_stored, position % BLOCK_SIZE, 0)
    row_ptr = rows_ptr + request * NUM_ROWS + place
    tl.store(row_ptr, position, mask=is_row)
    tl.store(row_ptr + all_rows, slot, mask=is_row)
    tl.store(row_ptr + 2 * all_rows, tl.where(is_here, position + 1, -1), mask=is_row)

    first_row = place * ROWS_PER_TILE
    size = tl.minimum(NUM_ROWS - first_row, ROWS_PER_TILE)
    tile_position = tl.where(is_here, first + first_row, 0)
    tile_ptr = tiles_ptr + request * NUM_TILES + place
    tl.store(tile_ptr, request + place * 0, mask=is_tile)
    tl.store(tile_ptr + all_tiles, request * NUM_ROWS + first_row, mask=is_tile)
    tl.store(tile_ptr + 2 * all_tiles, size, mask=is_tile)
    tl.store(tile_ptr + 3 * all_tiles, tile_position.to(tl.int32), mask=is_tile)
    last_key = tile_position + size - 1
    tl.store(tile_ptr + 4 * all_tiles, last_key.to(tl.int32), mask=is_tile)


def chain_rows(
    lengths: Tensor,  # [num_requests] int64; 0: the request is absent
    block_tables: Tensor,  # [num_requests, max_blocks] int32, rows any distance apart
    *,
    offset: int,
    num_rows: int,
    block_size: int,
    rows_per_tile: int,
) -> ChainRows:
    """What kernels.reference.chain_rows.chain_rows says, read from the device and left there."""
    num_requests, max_blocks = block_tables.shape
    num_tiles = cdiv(num_rows, rows_per_tile)
    rows = torch.empty(3, num_requests * num_rows, dtype=torch.int64, device=lengths.device)
    tiles = torch.empty(5, num_requests * num_tiles, dtype=torch.int32, device=lengths.device)
    if num_requests:
        chain_rows_kernel[(num_requests,)](
            rows,
            tiles,
            lengths,
            block_tables,
            offset,
            max_blocks,
            block_tables.stride(0),
            NUM_ROWS=num_rows,
            NUM_TILES=num_tiles,
            ROWS_PER_TILE=rows_per_tile,
            BLOCK_SIZE=block_size,
            ROWS=next_power_of_2(num_rows),
            num_warps=1,
        )
    return ChainRows(*rows.unbind(0), *tiles.unbind(0))
