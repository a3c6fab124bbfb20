"""kernels/reference/tree_rows.py, with tiles and branches as a CPU's attention reads them: in int64, none shared."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers
from kernels.cpu.recording import empty
from kernels.reference.tree_rows import NO_BRANCH, TreeRows

NUM_COLUMNS = len(TreeRows._fields) - 1  # of one number a row: all but the branches' slots
Arguments = arguments_of(
    *("rows", "branches", "lengths", "slots", "parents", "num_requests", "num_rows", "slot_stride", "parent_stride"),
    *("first", "offset", "depth"),
)


@cache
def laying_out() -> Kernel:
    def lay_out(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        all_rows, num_columns = a.num_requests * a.num_rows, a.first + a.num_rows
        rows, branches = integers(a.rows, NUM_COLUMNS * all_rows), integers(a.branches, all_rows * a.depth)
        lengths = integers(a.lengths, a.num_requests)
        for request in range(part, a.num_requests, num_parts):
            slots = integers(a.slots + 8 * request * a.slot_stride, num_columns)
            parents = integers(a.parents + 8 * request * a.parent_stride, num_columns)
            is_here, pending = lengths[request] > 0, lengths[request] + a.offset
            for place in range(a.num_rows):
                row, own, depth = request * a.num_rows + place, a.first + place, np.int64(0)
                above = own if is_here else np.int64(0)
                while above > 0 and depth < a.depth:
                    above, depth = parents[above - 1] + 1, depth + 1
                position = pending + depth if is_here else 0
                rows[row], rows[all_rows + row] = position, slots[own] if is_here else 0
                rows[2 * all_rows + row] = position + 1 if is_here else -1
                rows[3 * all_rows + row], rows[4 * all_rows + row], rows[5 * all_rows + row] = row, row, 1
                rows[6 * all_rows + row], rows[7 * all_rows + row] = position, 0
                rows[8 * all_rows + row] = position
                rows[9 * all_rows + row] = pending + 1 if is_here else NO_BRANCH
                for node in range(depth, a.depth):
                    branches[row * a.depth + node] = 0
                while depth > 0:
                    depth -= 1
                    branches[row * a.depth + depth] = slots[own]
                    own = parents[own - 1] + 1

    return Kernel(lay_out, Arguments)


def tree_rows(
    lengths: Tensor,  # [num_requests] int64; 0: the request is absent
    slots: Tensor,  # [num_requests, num_nodes + 1] int64, rows any distance apart, as the next
    parents: Tensor,  # [num_requests, num_nodes] int64
    *,
    first: int,
    offset: int,
    depth: int,
    rows_per_tile: int,  # of shared tiles
    split_keys: int | None,
) -> TreeRows:
    assert split_keys is None, "attention is not split"
    num_requests, num_nodes = parents.shape
    assert lengths.is_contiguous() and slots.stride(1) == 1 and (num_nodes <= 1 or parents.stride(1) == 1)
    num_rows = num_nodes + 1 - first
    rows = empty(NUM_COLUMNS, num_requests * num_rows, dtype=torch.int64)
    branches = empty(num_requests * num_rows, depth, dtype=torch.int64)
    laying_out()(
        *(tensor.data_ptr() for tensor in (rows, branches, lengths, slots, parents)),
        *(num_requests, num_rows, slots.stride(0), parents.stride(0), first, offset, depth),
    )
    return TreeRows._make((*rows.unbind(0), branches))
