"""kernels/reference/tree_rows.py in one launch: a program for each request, which climbs from all of its rows at once.

Twice: how deep a row is tells where the slots on its way belong.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.tree_rows import NO_BRANCH, TreeRows

_NO_BRANCH: tl.constexpr = tl.constexpr(NO_BRANCH)


@triton.jit(
    do_not_specialize=["num_nodes", "first", "offset", "depth"],
    do_not_specialize_on_alignment=["branch_slots_ptr", "lengths_ptr", "slots_ptr", "parents_ptr"],
)
def tree_rows_kernel(
    rows_ptr,  # [3, num_requests * num_rows] int64: positions, slots, predicted
    tiles_ptr,  # [6, num_requests * num_rows] int32: segments, rows, sizes, positions, last keys, branch starts
    branch_slots_ptr,  # [num_requests * num_rows, depth] int32
    lengths_ptr,  # [num_requests] int64
    slots_ptr,  # [num_requests, num_nodes + 1] int64
    parents_ptr,  # [num_requests, num_nodes] int64
    num_nodes,
    first,
    offset,
    depth,
    ROWS: tl.constexpr,  # >= num_rows
):
    request = tl.program_id(0).to(tl.int64)
    num_rows = num_nodes + 1 - first
    all_rows = tl.num_programs(0) * num_rows
    place = tl.arange(0, ROWS)
    is_row = place < num_rows
    row = request * num_rows + place
    slots_ptr += request * (num_nodes + 1) + 1  # of node 0; the pending token is node -1
    parents_ptr += request * num_nodes
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
    tile_ptr = tiles_ptr + row
    tl.store(tile_ptr, row.to(tl.int32), mask=is_row)
    tl.store(tile_ptr + all_rows, row.to(tl.int32), mask=is_row)
    tl.store(tile_ptr + 2 * all_rows, is_here.to(tl.int32), mask=is_row)
    tl.store(tile_ptr + 3 * all_rows, position.to(tl.int32), mask=is_row)
    tl.store(tile_ptr + 4 * all_rows, position.to(tl.int32), mask=is_row)
    branch_start = tl.where(is_here, length + offset + 1, _NO_BRANCH)
    tl.store(tile_ptr + 5 * all_rows, branch_start.to(tl.int32), mask=is_row)

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
) -> TreeRows:
    """What kernels.reference.tree_rows.tree_rows says; all arguments contiguous."""
    num_requests, num_nodes = parents.shape
    assert lengths.is_contiguous() and slots.is_contiguous() and parents.is_contiguous()
    num_rows = num_nodes + 1 - first
    rows = torch.empty(3, num_requests * num_rows, dtype=torch.int64, device=lengths.device)
    tiles = torch.empty(6, num_requests * num_rows, dtype=torch.int32, device=lengths.device)
    branch_slots = torch.empty(num_requests * num_rows, depth, dtype=torch.int32, device=lengths.device)
    if num_requests:
        tree_rows_kernel[(num_requests,)](
            rows,
            tiles,
            branch_slots,
            lengths,
            slots,
            parents,
            num_nodes,
            first,
            offset,
            depth,
            ROWS=triton.next_power_of_2(num_rows),
            num_warps=1,
        )
    return TreeRows._make((*rows.unbind(0), *tiles.unbind(0), branch_slots))
