"""kernels/reference/walk_tree.py in one launch: a program for each request."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.walk_tree import WalkedTree
from kernels.sizes import next_power_of_2


@Kernel
@triton.jit(
    do_not_specialize=["num_nodes", "depth"],
    do_not_specialize_on_alignment=["drawn_ptr", "draft_token_ids_ptr", "parents_ptr", "slots_ptr"],
)
def walk_tree_kernel(
    token_ids_ptr,  # [num_requests, depth + 1] int64
    counts_ptr,  # [2, num_requests] int64: accepted tokens, draft tokens
    source_slots_ptr,  # [num_requests, depth] int64
    target_slots_ptr,  # [num_requests, depth] int64
    rows_ptr,  # [num_requests, depth + 1] int64
    drawn_ptr,  # [num_requests, num_nodes + 1] int64
    draft_token_ids_ptr,  # [num_requests, num_nodes] int64
    parents_ptr,  # [num_requests, num_nodes] int64
    slots_ptr,  # [num_requests, num_nodes + 1] int64
    num_nodes,
    depth,
    NODES: tl.constexpr,  # >= num_nodes
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    drafts = tl.load(draft_token_ids_ptr + request * num_nodes + node, mask=node < num_nodes, other=-1)
    is_draft = drafts >= 0
    parents = tl.load(parents_ptr + request * num_nodes + node, mask=node < num_nodes, other=-1)
    first = request * (num_nodes + 1)
    token = tl.load(drawn_ptr + first)
    tl.store(token_ids_ptr + request * (depth + 1), token)
    tl.store(rows_ptr + request * (depth + 1), first)
    last = tl.zeros((), dtype=tl.int64)
    num_accepted = tl.zeros((), dtype=tl.int64)
    num_drafts = tl.where(token >= 0, tl.sum(is_draft.to(tl.int64), axis=0), 0)
    for place in range(depth):
        is_next = is_draft & (parents == last - 1) & (drafts == token)
        child = tl.max(tl.where(is_next, node + 1, 0), axis=0).to(tl.int64)
        is_accepted = child > 0  # where it is not, nothing changes, and so nothing behind it is
        last = tl.where(is_accepted, child, last)
        token = tl.load(drawn_ptr + first + last)
        num_accepted += is_accepted.to(tl.int64)
        tl.store(token_ids_ptr + request * (depth + 1) + place + 1, tl.where(is_accepted, token, -1))
        tl.store(rows_ptr + request * (depth + 1) + place + 1, first + child)
        source = tl.load(slots_ptr + first + child, mask=is_accepted, other=0)
        target = tl.load(slots_ptr + first + place + 1, mask=is_accepted, other=0)
        tl.store(source_slots_ptr + request * depth + place, source)
        tl.store(target_slots_ptr + request * depth + place, target)
    tl.store(counts_ptr + request, num_accepted)
    tl.store(counts_ptr + tl.num_programs(0) + request, num_drafts)


def walk_tree(
    drawn: Tensor,  # [num_requests * (num_nodes + 1)] int64
    draft_token_ids: Tensor,  # [num_requests, num_nodes] int64
    parents: Tensor,  # [num_requests, num_nodes] int64
    slots: Tensor,  # [num_requests, num_nodes + 1] int64
    *,
    depth: int,
) -> WalkedTree:
    """What kernels.reference.walk_tree.walk_tree says; all arguments contiguous."""
    num_requests, num_nodes = parents.shape
    assert all(t.is_contiguous() for t in (drawn, draft_token_ids, parents, slots))
    token_ids, rows = (drawn.new_empty(num_requests, depth + 1) for _ in range(2))
    source_slots, target_slots = (drawn.new_empty(num_requests, depth) for _ in range(2))
    counts = drawn.new_empty(2, num_requests)
    if num_requests:
        walk_tree_kernel[(num_requests,)](
            token_ids,
            counts,
            source_slots,
            target_slots,
            rows,
            drawn,
            draft_token_ids,
            parents,
            slots,
            num_nodes,
            depth,
            NODES=next_power_of_2(max(num_nodes, 1)),
            num_warps=1,
        )
    return WalkedTree(token_ids, counts[0], counts[1], source_slots, target_slots, rows.flatten())
