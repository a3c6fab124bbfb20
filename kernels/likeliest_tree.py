"""kernels/reference/likeliest_tree.py in one launch a level and one for the tree.

Nothing is sorted: a candidate's place is the number of those that come before it, which each program counts for
BLOCK candidates of a request, and for their parents where it needs theirs. So no program waits for another.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.likeliest_tree import NextRows, Tree, TreeCandidates
from kernels.sizes import cdiv

BLOCK = 64  # candidates of a program
CHUNK = 32  # that they are compared with at a time


@triton.jit
def num_before(scores, numbers, others, other_numbers, are_there):
    """[BLOCK] int32: of the [CHUNK] others those with a higher score, or with the same and a lower number."""
    is_higher = others[None, :] > scores[:, None]
    is_earlier = (others[None, :] == scores[:, None]) & (other_numbers[None, :] < numbers[:, None])
    return tl.sum(((is_higher | is_earlier) & are_there[None, :]).to(tl.int32), axis=1)


@triton.jit
def joint_scores(
    before_ptr,  # [num_rows] float64, or anything where has_before is 0
    log_probs_ptr,  # [num_rows, width] float32, rows row_stride apart
    numbers,
    number,
    width,
    row_stride,
    has_before,
):
    """float64: log-probabilities of the paths to the candidates; -inf behind the last of `number`."""
    is_there = numbers < number
    rows = numbers // width
    own = tl.load(log_probs_ptr + rows * row_stride + numbers % width, mask=is_there, other=float("-inf"))
    before = tl.load(before_ptr + rows, mask=is_there & (has_before > 0), other=0.0)
    scores = before + own.to(tl.float64)
    return tl.where(scores == scores, scores, float("-inf"))


@Kernel
@triton.jit(
    do_not_specialize=["level", "depth", "num_places", "num_rows", "width", "row_stride", "num_given", "num_next"],
    do_not_specialize_on_alignment=["next_token_ids_ptr", "next_rows_ptr"],
)
def add_level_kernel(
    placed_token_ids_ptr,  # [num_requests, depth, num_places] int64
    placed_scores_ptr,  # [num_requests, depth, num_places] float64
    placed_parents_ptr,  # [num_requests, depth, num_places] int64
    next_token_ids_ptr,  # [num_requests * num_next] int64
    next_rows_ptr,  # [num_requests * num_next] int64
    token_ids_ptr,  # [num_requests, num_given] int64
    log_probs_ptr,  # [num_requests, num_given] float32
    level,
    depth,
    num_places,
    num_rows,
    width,
    row_stride,  # width, or 0: all rows have the same candidates
    num_given,
    num_next,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    number = num_rows * width
    first = (request * depth + level) * num_places
    before_ptr = placed_scores_ptr + first - num_places
    log_probs_ptr += request * num_given
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores = joint_scores(before_ptr, log_probs_ptr, numbers, number, width, row_stride, level)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, number, CHUNK):
        other_numbers = start + tl.arange(0, CHUNK)
        others = joint_scores(before_ptr, log_probs_ptr, other_numbers, number, width, row_stride, level)
        place += num_before(scores, numbers, others, other_numbers, other_numbers < number)
    is_candidate = numbers < number
    place = tl.where(is_candidate, place, numbers)  # what is missing stands behind all that are there
    rows = tl.where(is_candidate, numbers // width, 0)
    token_ids = tl.load(
        token_ids_ptr + request * num_given + rows * row_stride + numbers % width, mask=is_candidate, other=0
    )
    parents = tl.where(is_candidate & (level > 0), (level - 1) * num_places + rows, -1)
    is_placed = place < num_places
    tl.store(placed_token_ids_ptr + first + place, token_ids, mask=is_placed)
    tl.store(placed_scores_ptr + first + place, scores, mask=is_placed)
    tl.store(placed_parents_ptr + first + place, parents.to(tl.int64), mask=is_placed)
    is_next = place < num_next
    tl.store(next_token_ids_ptr + request * num_next + place, token_ids, mask=is_next)
    tl.store(next_rows_ptr + request * num_next + place, request * num_rows + rows, mask=is_next)


@Kernel
@triton.jit(do_not_specialize=["number", "num_nodes"])
def likeliest_tree_kernel(
    nodes_ptr,  # [2, num_requests, num_nodes] int64: token ids, parents
    token_ids_ptr,  # [num_requests, number] int64
    scores_ptr,  # [num_requests, number] float64
    parents_ptr,  # [num_requests, number] int64
    number,
    num_nodes,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = request * number
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_candidate = numbers < number
    scores = tl.load(scores_ptr + first + numbers, mask=is_candidate, other=float("-inf"))
    parents = tl.load(parents_ptr + first + numbers, mask=is_candidate, other=-1).to(tl.int32)
    scores_of_parents = tl.load(scores_ptr + first + parents, mask=parents >= 0, other=float("inf"))
    node = tl.zeros((BLOCK,), dtype=tl.int32)
    parent_node = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, number, CHUNK):
        other_numbers = start + tl.arange(0, CHUNK)
        are_there = other_numbers < number
        others = tl.load(scores_ptr + first + other_numbers, mask=are_there, other=float("-inf"))
        node += num_before(scores, numbers, others, other_numbers, are_there)
        parent_node += num_before(scores_of_parents, parents, others, other_numbers, are_there)
    is_node = scores > float("-inf")
    token_ids = tl.load(token_ids_ptr + first + numbers, mask=is_candidate & is_node, other=-1)
    parent_node = tl.where(is_node & (parents >= 0), parent_node, -1).to(tl.int64)
    node_ptr = nodes_ptr + request * num_nodes + node
    is_chosen = is_candidate & (node < num_nodes)
    tl.store(node_ptr, token_ids, mask=is_chosen)
    tl.store(node_ptr + tl.num_programs(0) * num_nodes, parent_node, mask=is_chosen)


def add_level(
    tree: TreeCandidates,
    level: int,
    token_ids: Tensor,  # [num_requests * num_rows, width] int64, or [num_requests, width]
    log_probs: Tensor,  # as token_ids, float32
    *,
    num_rows: int,
    num_next: int = 0,
) -> NextRows:
    """What kernels.reference.likeliest_tree.add_level says; all tensors contiguous."""
    assert all(own.is_contiguous() for own in (*tree, token_ids, log_probs))
    num_requests, depth, num_places = tree.scores.shape
    assert num_next <= num_places, "the next rows have places"
    width = token_ids.shape[1]
    next_rows = NextRows._make(token_ids.new_empty(2, num_requests * num_next).unbind(0))
    if num_requests:
        num_given = token_ids.numel() // num_requests
        add_level_kernel[(num_requests, cdiv(max(num_rows * width, num_places), BLOCK))](
            *tree,
            *next_rows,
            token_ids,
            log_probs,
            level,
            depth,
            num_places,
            num_rows,
            width,
            width if num_given == num_rows * width else 0,
            num_given,
            num_next,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            num_warps=4,
        )
    return next_rows


def likeliest_tree(candidates: TreeCandidates, num_nodes: int) -> Tree:
    """What kernels.reference.likeliest_tree.likeliest_tree says; all tensors contiguous."""
    assert all(own.is_contiguous() for own in candidates)
    num_requests, depth, num_places = candidates.scores.shape
    assert num_nodes <= depth * num_places, "a node is a candidate"
    nodes = candidates.token_ids.new_empty(2, num_requests, num_nodes)
    if num_requests:
        likeliest_tree_kernel[(num_requests, cdiv(depth * num_places, BLOCK))](
            nodes,
            *candidates,
            depth * num_places,
            num_nodes,
            BLOCK=BLOCK,
            CHUNK=CHUNK,
            num_warps=4,
        )
    return Tree._make(nodes.unbind(0))
