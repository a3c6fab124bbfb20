"""Draft trees on the host: the order of their nodes, and how they become DraftTokens.

Depth-first order gives one run a leaf (runner/engine/launch.py), so a path of the tree is computed like a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.reference.likeliest_tree import Tree
from runner.engine.draft_trees import tree_shape
from runner.engine.request import DraftTokens
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """One request's guesses. Parents come before children; -1 = the pending token; siblings are distinct tokens."""

    token_ids: list[int]
    parents: list[int]

    def depth_first(self) -> DraftTree:
        """The same tree, its nodes in depth-first order; siblings keep their order."""
        order, parents = depth_first(self.parents)
        return DraftTree(token_ids=[self.token_ids[node] for node in order], parents=parents)


def draft_tokens_from_nodes(
    token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], limits: Sequence[int], device: torch.device
) -> DraftTokens:
    """DraftTokens of every request's first nodes, at most `limit` each.

    Args:
        token_ids: of each request; -1 behind the last node.
        parents: the first n nodes are a tree.
    """
    trees = []
    for own, of_own, limit in zip(token_ids, parents, limits, strict=True):
        nodes = [token for token in own[:limit] if token >= 0]
        trees.append(DraftTree(token_ids=nodes, parents=list(of_own[: len(nodes)])).depth_first())
    return draft_tokens_from_trees(trees, device)


def padded_tree(token_ids: Tensor, numbers: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> Tree:
    """Trees of candidates, [num_requests, most nodes], -1 behind the last node of each; nothing is read back.

    Args:
        token_ids: [num_candidates] int64.
        numbers, parents: of each request's nodes.
    """
    most = max(map(len, numbers), default=0)
    places = [[*own, *[-1] * (most - len(own))] for of_all in (numbers, parents) for own in of_all]
    placed = to_device(places, torch.int64, token_ids.device).view(2, len(numbers), most)
    if most == 0:
        return Tree(placed[0], placed[1])
    return Tree(torch.where(placed[0] < 0, -1, token_ids[placed[0].clamp(min=0)]), placed[1].contiguous())


def depth_first(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """(nodes in depth-first order, their parents under the new numbers); siblings keep their order."""
    children = tree_shape(parents).children
    order: list[int] = []
    waiting = list(reversed(children[0]))
    while waiting:
        order.append(node := waiting.pop())
        waiting += reversed(children[node + 1])
    number = {node: place for place, node in enumerate(order)} | {-1: -1}
    return order, [number[parents[node]] for node in order]


def draft_tokens_from_trees(trees: Sequence[DraftTree], device: torch.device) -> DraftTokens:
    """DraftTokens of host-side trees, one a decoding request."""
    token_ids = [token for tree in trees for token in tree.token_ids]
    return DraftTokens(
        token_ids=to_device(token_ids, torch.int64, device),
        cu_num_draft_tokens=[0, *accumulate(len(tree.token_ids) for tree in trees)],
        parent_indices=[parent for tree in trees for parent in tree.parents],
    )
