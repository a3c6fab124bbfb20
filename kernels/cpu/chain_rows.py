"""kernels/reference/chain_rows.py, with tiles as a CPU's attention reads them: in int64."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers
from kernels.cpu.recording import empty
from kernels.reference.chain_rows import ChainRows

Arguments = arguments_of(
    *("rows", "tiles", "lengths", "tables", "num_requests", "max_blocks", "table_stride"),
    *("offset", "num_rows", "num_tiles", "rows_per_tile", "block_size"),
)


@cache
def laying_out() -> Kernel:
    def lay_out(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        all_rows, all_tiles = a.num_requests * a.num_rows, a.num_requests * a.num_tiles
        rows, tiles = integers(a.rows, 3 * all_rows), integers(a.tiles, 5 * all_tiles)
        lengths, tables = integers(a.lengths, a.num_requests), integers(a.tables, a.num_requests * a.table_stride)
        for request in range(part, a.num_requests, num_parts):
            is_here = lengths[request] > 0
            first = lengths[request] + a.offset if is_here else 0
            for place in range(a.num_rows):
                row, position = request * a.num_rows + place, first + place if is_here else 0
                block = position // a.block_size
                # Rows behind the last block a table can hold are nobody's: their tokens cannot be committed.
                is_stored = is_here and block < a.max_blocks
                slot = (
                    tables[request * a.table_stride + block] * a.block_size + position % a.block_size
                    if is_stored
                    else 0
                )
                rows[row], rows[all_rows + row] = position, slot
                rows[2 * all_rows + row] = position + 1 if is_here else -1
            for place in range(a.num_tiles):
                tile, first_row = request * a.num_tiles + place, place * a.rows_per_tile
                size = min(a.num_rows - first_row, a.rows_per_tile)
                position = first + first_row if is_here else 0
                tiles[tile], tiles[all_tiles + tile] = request, request * a.num_rows + first_row
                tiles[2 * all_tiles + tile], tiles[3 * all_tiles + tile] = size, position
                tiles[4 * all_tiles + tile] = position + size - 1

    return Kernel(lay_out, Arguments)


def chain_rows(
    lengths: Tensor,  # [num_requests] int64; 0: the request is absent
    block_tables: Tensor,  # [num_requests, max_blocks] int64, rows any distance apart
    *,
    offset: int,
    num_rows: int,
    block_size: int,
    rows_per_tile: int,
) -> ChainRows:
    num_requests, max_blocks = block_tables.shape
    assert lengths.is_contiguous() and block_tables.dtype == torch.int64 and block_tables.stride(1) == 1
    num_tiles = -(-num_rows // rows_per_tile)
    rows = empty(3, num_requests * num_rows, dtype=torch.int64)
    tiles = empty(5, num_requests * num_tiles, dtype=torch.int64)
    laying_out()(
        *(rows.data_ptr(), tiles.data_ptr(), lengths.data_ptr(), block_tables.data_ptr()),
        *(num_requests, max_blocks, block_tables.stride(0)),
        *(offset, num_rows, num_tiles, rows_per_tile, block_size),
    )
    return ChainRows(*rows.unbind(0), *tiles.unbind(0))
