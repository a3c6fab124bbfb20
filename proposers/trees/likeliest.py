"""The most probable nodes of a tree, chosen on the device: shapes as data, for steps without the host.

Candidates come level by level, as proposers/trees/growth.py numbers them. A child is no likelier than its parent,
and of equals the earlier one comes first, so the best of them are a tree, and the first of these a smaller tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    token_ids: Tensor  # [num_requests, num_nodes] int64; -1: there is no node
    parents: Tensor  # [num_requests, num_nodes] int64: an earlier node, -1 = the pending token


@dataclass(frozen=True, kw_only=True)
class Level:
    """Candidates of one depth; all [num_requests, number]."""

    token_ids: Tensor  # int64
    scores: Tensor  # float64: log-probability of the path
    parents: Tensor  # int64: place among all candidates before this level, -1 = the pending token


def best(scores: Tensor, count: int) -> Tensor:
    """Places of the highest of [num_requests, number], from the highest on, of equals the first first; [.., count]."""
    scores = scores.nan_to_num(nan=float("-inf"))  # a sort takes NaN for the highest
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def likeliest_tree(levels: list[Level], num_nodes: int) -> Tree:
    """The num_nodes best candidates of all levels from the likeliest on; without a probability there is no node."""
    token_ids, scores, parents = (
        torch.cat(columns, dim=1)
        for columns in zip(*((level.token_ids, level.scores, level.parents) for level in levels), strict=True)
    )
    order = best(scores, scores.shape[1])
    # Of each candidate the node that it becomes; the last entry stands for the pending token.
    nodes = torch.full_like(order[:, :1], -1).expand(-1, order.shape[1] + 1).clone()
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    nodes.scatter_(1, order, places)
    chosen = order[:, :num_nodes]
    parents = parents.gather(1, chosen)
    parents = nodes.gather(1, torch.where(parents < 0, order.shape[1], parents))
    is_node = scores.gather(1, chosen) > float("-inf")
    tree = Tree(
        token_ids=torch.where(is_node, token_ids.gather(1, chosen), -1),
        parents=torch.where(is_node, parents, -1),
    )
    missing = num_nodes - chosen.shape[1]
    return tree if missing <= 0 else Tree(*(torch.nn.functional.pad(column, (0, missing), value=-1) for column in tree))
