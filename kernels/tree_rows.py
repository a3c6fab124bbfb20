"""kernels/reference/tree_rows.py in one launch: a program for each request, which climbs from all of its rows at once.

It climbs twice: a row's depth, known after the first climb, tells the second where the slots on its path belong.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.tree_rows import NO_BRANCH, TreeRows
from kernels.sizes import cdiv, next_power_of_2

_NO_BRANCH: tl.constexpr = tl.constexpr(NO_BRANCH)


@Kernel
@triton.jit(
    do_not_specialize=["num_nodes", "slots_stride", "parents_stride", "first", "offset", "depth", "num_shared"],
    do_not_specialize_on_alignment=["branch_starts_ptr", "branch_slots_ptr", "lengths_ptr", "slots_ptr", "parents_ptr"],
)
def tree_rows_kernel(
    rows_ptr,  # [3, num_requests * num_rows] int64: positions, slots, predicted
    tiles_ptr,  # [6, num_tiles] int32: segments, rows, sizes, positions, first keys, last keys
    branch_starts_ptr,  # [num_requests * num_rows] int32
    branch_slots_ptr,  # [num_requests * num_rows, depth] int32
    lengths_ptr,  # [num_requests] int64
    slots_ptr,  # [num_requests, num_nodes + 1] int64, slots_stride apart
    parents_ptr,  # [num_requests, num_nodes] int64, parents_stride apart
    num_nodes,
    slots_stride,
    parents_stride,
    first,
    offset,
    depth,
    num_shared,  # tiles of a request
    ROWS_PER_TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,  # 0: no tile is shared
    ROWS: tl.constexpr,  # >= num_rows
):
    request = tl.program_id(0).to(tl.int64)
    num_rows = num_nodes + 1 - first
    all_rows = tl.num_programs(0) * num_rows
    place = tl.arange(0, ROWS)
    is_row = place < num_rows
    row = request * num_rows + place
    slots_ptr += request * slots_stride + 1  # of node 0; the pending token is node -1
    parents_ptr += request * parents_stride
    length = tl.load(lengths_ptr + request)
    node = tl.where(is_row, first - 1 + place, -1).to(tl.int64)

    above = node
    own_depth = tl.zeros((ROWS,), dtype=tl.int64)
    for _ in range(depth):
        own_depth += (above >= 0).to(tl.int64)
        above = tl.load(parents_ptr + above, mask=above >= 0, other=above)
    is_here = is_row & (length > 0)

    position = tl.where(is_here, length + offset + own_depth, 0)
    row_ptr = rows_ptr + row
    tl.store(row_ptr, position, mask=is_row)
    tl.store(row_ptr + all_rows, tl.load(slots_ptr + node, mask=is_here, other=0), mask=is_row)
    tl.store(row_ptr + 2 * all_rows, tl.where(is_here, position + 1, -1), mask=is_row)
    branch_start = tl.where(is_here, length + offset + 1, _NO_BRANCH)
    tl.store(branch_starts_ptr + row, branch_start.to(tl.int32), mask=is_row)

    all_shared = tl.num_programs(0) * num_shared
    num_tiles = all_shared + all_rows
    num_shared_keys = tl.zeros((), dtype=tl.int64)
    if SPLIT_KEYS > 0:
        num_shared_keys = tl.where(length > 0, length + offset + 1, 0) // SPLIT_KEYS * SPLIT_KEYS
        tile_ptr = tiles_ptr + request * num_shared + place
        is_tile = place < num_shared
        first_row = request * num_rows + place * ROWS_PER_TILE
        size = tl.minimum(num_rows - place * ROWS_PER_TILE, ROWS_PER_TILE)
        size = tl.where(num_shared_keys > 0, size, 0)
        last_shared = tl.maximum(num_shared_keys - 1, 0) + place * 0
        tl.store(tile_ptr, first_row.to(tl.int32), mask=is_tile)
        tl.store(tile_ptr + num_tiles, first_row.to(tl.int32), mask=is_tile)
        tl.store(tile_ptr + 2 * num_tiles, size.to(tl.int32), mask=is_tile)
        tl.store(tile_ptr + 3 * num_tiles, last_shared.to(tl.int32), mask=is_tile)
        tl.store(tile_ptr + 4 * num_tiles, place * 0, mask=is_tile)
        tl.store(tile_ptr + 5 * num_tiles, last_shared.to(tl.int32), mask=is_tile)
    tile_ptr = tiles_ptr + all_shared + row
    tl.store(tile_ptr, row.to(tl.int32), mask=is_row)
    tl.store(tile_ptr + num_tiles, row.to(tl.int32), mask=is_row)
    tl.store(tile_ptr + 2 * num_tiles, 1 + place * 0, mask=is_row)
    tl.store(tile_ptr + 3 * num_tiles, position.to(tl.int32), mask=is_row)
    tl.store(tile_ptr + 4 * num_tiles, (num_shared_keys + place * 0).to(tl.int32), mask=is_row)
    tl.store(tile_ptr + 5 * num_tiles, position.to(tl.int32), mask=is_row)

    above = node
    for step in range(depth):
        is_on_way = is_here & (above >= 0)
        slot = tl.load(slots_ptr + above, mask=is_on_way, other=0)
        entry = tl.where(step < own_depth, own_depth - 1 - step, step)
        tl.store(branch_slots_ptr + row * depth + entry, slot.to(tl.int32), mask=is_row)
        above = tl.load(parents_ptr + above, mask=is_on_way, other=-1)


def tree_rows(
    lengths: Tensor,  # [num_requests] int64; 0: the request is absent
    slots: Tensor,  # [num_requests, num_nodes + 1] int64
    parents: Tensor,  # [num_requests, num_nodes] int64
    *,
    first: int,
    offset: int,
    depth: int,
    rows_per_tile: int,
    split_keys: int | None,
) -> TreeRows:
    """What kernels.reference.tree_rows.tree_rows says; requests may lie any distance apart."""
    num_requests, num_nodes = parents.shape
    assert lengths.is_contiguous() and slots.stride(1) == 1 and (num_nodes == 0 or parents.stride(1) == 1)
    num_rows = num_nodes + 1 - first
    rows = torch.empty(3, num_requests * num_rows, dtype=torch.int64, device=lengths.device)
    num_shared = 0 if split_keys is None else cdiv(num_rows, rows_per_tile)
    tiles = torch.empty(6, num_requests * (num_shared + num_rows), dtype=torch.int32, device=lengths.device)
    branch_starts = torch.empty(num_requests * num_rows, dtype=torch.int32, device=lengths.device)
    branch_slots = torch.empty(num_requests * num_rows, depth, dtype=torch.int32, device=lengths.device)
    if num_requests:
        tree_rows_kernel[(num_requests,)](
            rows,
            tiles,
            branch_starts,
            branch_slots,
            lengths,
            slots,
            parents,
            num_nodes,
            slots.stride(0),
            parents.stride(0),
            first,
            offset,
            depth,
            num_shared,
            ROWS_PER_TILE=rows_per_tile,
            SPLIT_KEYS=split_keys or 0,
            ROWS=next_power_of_2(num_rows),
            num_warps=1,
        )
    return TreeRows._make((*rows.unbind(0), *tiles.unbind(0), branch_starts, branch_slots))
