"""kernels/reference/match_in_tree.py, compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import integers
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference.likeliest_tree import Tree

Arguments = arguments_of(
    *("new_token_ids", "new_parents", "numbers", "match", "token_ids", "parents"),
    *("num_requests", "num_nodes", "depth"),
)
PART_WORK = 1 << 12  # comparisons, made in some microseconds


@cache
def merging() -> Kernel:
    def merge(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Arguments)[0]
        for request in range(part, a.num_requests, num_parts):
            first = 8 * request * a.num_nodes
            new_token_ids = integers(a.new_token_ids + first, a.num_nodes)
            new_parents = integers(a.new_parents + first, a.num_nodes)
            match, numbers = integers(a.match + first, a.num_nodes), integers(a.numbers + first, a.num_nodes)
            token_ids, parents = integers(a.token_ids + first, a.num_nodes), integers(a.parents + first, a.num_nodes)
            num_placed = 0
            while num_placed < a.num_nodes and match[num_placed] >= 0:
                new_token_ids[num_placed], new_parents[num_placed] = match[num_placed], num_placed - 1
                num_placed += 1
            num_matched, last, level = num_placed, -1, 0
            for node in range(a.num_nodes):
                numbers[node] = -1
            while level < min(num_matched, a.depth):
                following = -1
                for node in range(a.num_nodes):
                    if parents[node] == last and token_ids[node] == match[level]:
                        following = node
                if following < 0:
                    break
                numbers[following], last = level, following
                level += 1
            for node in range(a.num_nodes):  # parents come before their children
                if token_ids[node] < 0 or numbers[node] >= 0 or num_placed == a.num_nodes:
                    continue
                numbers[node] = num_placed
                new_token_ids[num_placed] = token_ids[node]
                new_parents[num_placed] = numbers[parents[node]] if parents[node] >= 0 else -1
                num_placed += 1
            for place in range(num_placed, a.num_nodes):
                new_token_ids[place] = new_parents[place] = -1

    return Kernel(merge, Arguments)


def match_in_tree(match: Tensor, tree: Tree, *, depth: int) -> Tree:
    num_requests, num_nodes = match.shape
    assert all(tensor.is_contiguous() for tensor in (match, *tree))
    token_ids, parents, numbers = (empty(num_requests, num_nodes, dtype=torch.int64) for _ in range(3))
    merging()(
        *(tensor.data_ptr() for tensor in (token_ids, parents, numbers, match, *tree)),
        *(num_requests, num_nodes, depth),
        parts=parts_of(num_requests * num_nodes * (depth + 1), PART_WORK, num_requests),
    )
    return Tree(token_ids, parents)
