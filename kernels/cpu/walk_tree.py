"""kernels/reference/walk_tree.py, compiled."""

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
from kernels.reference.walk_tree import WalkedTree

Arguments = arguments_of(
    *("token_ids", "num_accepted", "num_drafts", "source_slots", "target_slots", "rows"),
    *("drawn", "draft_token_ids", "parents", "slots", "num_requests", "num_nodes"),
    *("draft_stride", "parent_stride", "slot_stride", "depth"),
)


@cache
def walking() -> Kernel:
    def walk(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        num_rows, width = a.num_nodes + 1, a.depth + 1
        token_ids, rows = integers(a.token_ids, a.num_requests * width), integers(a.rows, a.num_requests * width)
        accepted_counts, draft_counts = integers(a.num_accepted, a.num_requests), integers(a.num_drafts, a.num_requests)
        sources = integers(a.source_slots, a.num_requests * a.depth)
        targets = integers(a.target_slots, a.num_requests * a.depth)
        all_drawn = integers(a.drawn, a.num_requests * num_rows)
        for request in range(part, a.num_requests, num_parts):
            drafts = integers(a.draft_token_ids + 8 * request * a.draft_stride, a.num_nodes)
            parents = integers(a.parents + 8 * request * a.parent_stride, a.num_nodes)
            slots = integers(a.slots + 8 * request * a.slot_stride, num_rows)
            first = request * num_rows
            num_drafts, num_accepted, last = 0, 0, np.int64(0)  # the last row on the way
            for node in range(a.num_nodes):
                num_drafts += 1 if drafts[node] >= 0 and all_drawn[first] >= 0 else 0
            token_ids[request * width], rows[request * width] = all_drawn[first], first
            while num_accepted < a.depth:
                drawn, child = all_drawn[first + last], a.num_nodes  # no child comes before its parent
                for node in range(last, a.num_nodes):
                    if drafts[node] >= 0 and parents[node] == last - 1 and drafts[node] == drawn:
                        child = node
                        break
                if child == a.num_nodes:
                    break
                last, place = child + 1, request * a.depth + num_accepted
                sources[place], targets[place] = slots[last], slots[num_accepted + 1]
                num_accepted += 1
                token_ids[request * width + num_accepted] = all_drawn[first + last]
                rows[request * width + num_accepted] = first + last
            for place in range(num_accepted, a.depth):
                sources[request * a.depth + place], targets[request * a.depth + place] = 0, 0
                token_ids[request * width + place + 1], rows[request * width + place + 1] = -1, first
            accepted_counts[request], draft_counts[request] = num_accepted, num_drafts

    return Kernel(walk, Arguments)


def walk_tree(
    drawn: Tensor,  # [num_requests * (num_nodes + 1)] int64
    draft_token_ids: Tensor,  # [num_requests, num_nodes] int64, rows any distance apart, as the next two
    parents: Tensor,  # [num_requests, num_nodes] int64
    slots: Tensor,  # [num_requests, num_nodes + 1] int64
    *,
    depth: int,
) -> WalkedTree:
    num_requests, num_nodes = parents.shape
    values = (draft_token_ids, parents, slots)
    assert drawn.is_contiguous() and all(value.shape[1] <= 1 or value.stride(1) == 1 for value in values)
    counts, moves = empty(2, num_requests, dtype=torch.int64), empty(2, num_requests, depth, dtype=torch.int64)
    token_ids, rows = (empty(num_requests, depth + 1, dtype=torch.int64) for _ in range(2))
    walked = WalkedTree._make((token_ids, *counts.unbind(0), *moves.unbind(0), rows.view(-1)))
    walking()(
        *(tensor.data_ptr() for tensor in (*walked, drawn, *values)),
        *(num_requests, num_nodes, *(value.stride(0) for value in values), depth),
    )
    return walked
