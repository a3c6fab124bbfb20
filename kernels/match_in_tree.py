"""kernels/reference/match_in_tree.py in one launch: a program for each request."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.likeliest_tree import Tree
from kernels.sizes import next_power_of_2


@Kernel
@triton.jit(do_not_specialize=["num_nodes", "depth"], do_not_specialize_on_alignment=["parents_ptr"])
def match_in_tree_kernel(
    nodes_ptr,  # [2, num_requests, num_nodes] int64: token ids, parents
    match_ptr,  # [num_requests, num_nodes] int64
    token_ids_ptr,  # [num_requests, num_nodes] int64
    parents_ptr,  # [num_requests, num_nodes] int64
    num_nodes,
    depth,
    NODES: tl.constexpr,  # >= num_nodes
):
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, NODES)
    is_place = places < num_nodes
    first = request * num_nodes
    match = tl.load(match_ptr + first + places, mask=is_place, other=-1)
    token_ids = tl.load(token_ids_ptr + first + places, mask=is_place, other=-1)
    parents = tl.load(parents_ptr + first + places, mask=is_place, other=-1).to(tl.int32)
    is_node = token_ids >= 0
    is_matched = match >= 0
    num_matched = tl.sum(is_matched.to(tl.int32), axis=0)
    numbers = tl.full((NODES,), -1, dtype=tl.int32)
    last = tl.full((), -1, dtype=tl.int32)
    for level in range(depth):
        token = tl.load(match_ptr + first + level)
        is_next = is_node & (parents == last) & (token_ids == token)
        numbers = tl.where(is_next, level, numbers)
        last = tl.max(tl.where(is_next, places, -2), axis=0)
    is_kept = is_node & (numbers < 0)
    is_before = is_kept[None, :] & (places[None, :] < places[:, None])
    numbers = tl.where(is_kept, num_matched + tl.sum(is_before.to(tl.int32), axis=1), numbers)
    of_parents = tl.sum(tl.where(parents[:, None] == places[None, :], numbers[None, :], 0), axis=1)
    of_parents = tl.where(parents < 0, -1, of_parents).to(tl.int64)
    nodes_ptr += first
    in_parents = tl.num_programs(0) * num_nodes
    # Matched nodes and empty places, then the tree's: no place is written twice.
    is_own = is_place & (is_matched | (places >= num_matched + tl.sum(is_kept.to(tl.int32), axis=0)))
    tl.store(nodes_ptr + places, match, mask=is_own)
    tl.store(nodes_ptr + in_parents + places, tl.where(is_matched, places - 1, -1).to(tl.int64), mask=is_own)
    is_left = is_kept & (numbers < num_nodes)
    tl.store(nodes_ptr + numbers, token_ids, mask=is_left)
    tl.store(nodes_ptr + in_parents + numbers, of_parents, mask=is_left)


def match_in_tree(match: Tensor, tree: Tree, *, depth: int) -> Tree:
    """What kernels.reference.match_in_tree.match_in_tree says; all tensors contiguous."""
    assert all(own.is_contiguous() for own in (match, *tree))
    num_requests, num_nodes = match.shape
    nodes = match.new_empty(2, num_requests, num_nodes)
    if num_requests and num_nodes:
        match_in_tree_kernel[(num_requests,)](
            nodes,
            match,
            *tree,
            num_nodes,
            min(depth, num_nodes),
            NODES=max(16, next_power_of_2(num_nodes)),
            num_warps=4,
        )
    return Tree._make(nodes.unbind(0))
