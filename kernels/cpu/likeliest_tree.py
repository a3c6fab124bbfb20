"""kernels/reference/likeliest_tree.py, compiled: nothing is sorted but the best, as they come."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from kernels.cpu.kernel import Kernel, arguments_of
from kernels.cpu.native import floats, integers, pointer
from kernels.cpu.recording import empty
from kernels.cpu.threads import parts_of
from kernels.reference.likeliest_tree import NextRows, Tree, TreeCandidates

Level = arguments_of(
    *("tree_token_ids", "tree_scores", "tree_parents", "next_token_ids", "next_rows", "token_ids", "log_probs"),
    *("num_requests", "depth", "num_places", "level", "given_rows", "width", "num_rows", "num_next"),
)
Choice = arguments_of(
    *("token_ids", "parents", "tree_token_ids", "tree_scores", "tree_parents"),
    *("num_requests", "num_candidates", "num_nodes"),
)
PART_WORK = 1 << 12  # comparisons, made in some microseconds
NEG_INF = np.float64("-inf")


@cache
def adding() -> Kernel:
    def add(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Level)[0]
        for request in range(part, a.num_requests, num_parts):
            first = 8 * (request * a.depth + a.level) * a.num_places  # the level's bytes, and those of the level before
            before = first - 8 * a.num_places
            tokens = integers(a.tree_token_ids + first, a.num_places)
            parents = integers(a.tree_parents + first, a.num_places)
            scores = carray(pointer(a.tree_scores + first), (a.num_places,), np.float64)
            parent_scores = carray(pointer(a.tree_scores + before), (a.num_places,), np.float64)
            given = integers(a.token_ids + 8 * request * a.given_rows * a.width, a.given_rows * a.width)
            log_probs = floats(a.log_probs + 4 * request * a.given_rows * a.width, a.given_rows, a.width)
            count = 0
            for row in range(a.num_rows):
                given_row = row if a.given_rows > 1 else 0
                for rank in range(a.width):
                    score = np.float64(log_probs[given_row, rank])
                    if a.level > 0:
                        score += parent_scores[row]
                    if score != score:
                        score = NEG_INF
                    if count == a.num_places and not score > scores[count - 1]:
                        continue
                    count = min(count + 1, a.num_places)
                    place = count - 1
                    while place > 0 and scores[place - 1] < score:
                        scores[place], tokens[place] = scores[place - 1], tokens[place - 1]
                        parents[place] = parents[place - 1]
                        place -= 1
                    scores[place], tokens[place] = score, given[given_row * a.width + rank]
                    parents[place] = (a.level - 1) * a.num_places + row if a.level > 0 else -1
            for place in range(count, a.num_places):
                scores[place], tokens[place], parents[place] = NEG_INF, 0, -1
            next_tokens = integers(a.next_token_ids + 8 * request * a.num_next, a.num_next)
            next_rows = integers(a.next_rows + 8 * request * a.num_next, a.num_next)
            for place in range(a.num_next):
                row = parents[place] - (a.level - 1) * a.num_places if parents[place] >= 0 else 0
                next_tokens[place], next_rows[place] = tokens[place], request * a.num_rows + row

    return Kernel(add, Level)


@cache
def choosing() -> Kernel:
    def choose(arguments: Any, part: int, num_parts: int, thread: int) -> None:
        a = carray(arguments, 1, Choice)[0]
        for request in range(part, a.num_requests, num_parts):
            first, own = 8 * request * a.num_candidates, 8 * request * a.num_nodes
            tokens = integers(a.tree_token_ids + first, a.num_candidates)
            all_parents = integers(a.tree_parents + first, a.num_candidates)
            scores = carray(pointer(a.tree_scores + first), (a.num_candidates,), np.float64)
            nodes, parents = integers(a.token_ids + own, a.num_nodes), integers(a.parents + own, a.num_nodes)
            count = 0
            for candidate in range(a.num_candidates):
                if not scores[candidate] > (scores[nodes[count - 1]] if count == a.num_nodes else NEG_INF):
                    continue
                count = min(count + 1, a.num_nodes)
                place = count - 1
                while place > 0 and scores[nodes[place - 1]] < scores[candidate]:
                    nodes[place] = nodes[place - 1]
                    place -= 1
                nodes[place] = candidate
            for node in range(count):
                parent = all_parents[nodes[node]]
                place = node - 1 if parent >= 0 else -1  # a parent comes before its child
                while place >= 0 and nodes[place] != parent:
                    place -= 1
                parents[node] = place
            for node in range(a.num_nodes):
                nodes[node] = tokens[nodes[node]] if node < count else -1
                parents[node] = parents[node] if node < count else -1

    return Kernel(choose, Choice)


def add_level(
    tree: TreeCandidates,  # its levels before this one are written
    level: int,
    token_ids: Tensor,  # [num_requests * num_rows, width] int64, or [num_requests, width]: the same for all rows
    log_probs: Tensor,  # as token_ids, float32
    *,
    num_rows: int,
    num_next: int = 0,
) -> NextRows:
    num_requests, depth, num_places = tree.scores.shape
    assert all(tensor.is_contiguous() for tensor in (*tree, token_ids, log_probs))
    assert max(num_rows, num_next) <= num_places and (level > 0 or num_rows == 1)
    following = NextRows(*(empty(num_requests * num_next, dtype=torch.int64) for _ in NextRows._fields))
    adding()(
        *(tensor.data_ptr() for tensor in (*tree, *following, token_ids, log_probs)),
        *(num_requests, depth, num_places, level, len(token_ids) // num_requests, token_ids.shape[1]),
        *(num_rows, num_next),
        parts=parts_of(token_ids.numel() * num_places, PART_WORK, num_requests),
    )
    return following


def likeliest_tree(candidates: TreeCandidates, num_nodes: int) -> Tree:
    num_requests, depth, num_places = candidates.scores.shape
    assert all(tensor.is_contiguous() for tensor in candidates) and num_nodes <= depth * num_places
    tree = Tree(*(empty(num_requests, num_nodes, dtype=torch.int64) for _ in Tree._fields))
    choosing()(
        *(tensor.data_ptr() for tensor in (*tree, *candidates)),
        *(num_requests, depth * num_places, num_nodes),
        parts=parts_of(candidates.scores.numel() * num_nodes, PART_WORK, num_requests),
    )
    return tree
