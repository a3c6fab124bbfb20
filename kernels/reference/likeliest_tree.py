"""The most probable nodes of a tree that grows level by level, chosen on the device: shapes as data, without the host.

A level has as many places as a tree may have nodes or a next level rows: no more of its candidates can matter. A child
is no likelier than its parent, and of equals the earlier one comes first, so the best of all levels are a tree, and the
first of these a smaller tree. (EAGLE-2, arXiv 2406.16858; proposers/trees/growth.py is the host's way.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TreeCandidates(NamedTuple):
    """The best of each level, the likeliest first; a place that no candidate takes has the score -inf."""

    token_ids: Tensor  # [num_requests, depth, num_places] int64
    scores: Tensor  # [num_requests, depth, num_places] float64: log-probability of the path
    parents: Tensor  # [num_requests, depth, num_places] int64: place among those of all levels, -1 = the pending token

    @classmethod
    def unwritten(cls, num_requests: int, depth: int, num_places: int, device: torch.device) -> TreeCandidates:
        def tensor(dtype: torch.dtype) -> Tensor:
            return torch.empty(num_requests, depth, num_places, dtype=dtype, device=device)

        return cls(tensor(torch.int64), tensor(torch.float64), tensor(torch.int64))


class NextRows(NamedTuple):
    """The first candidates of a level, in their order: what a drafter goes on from."""

    token_ids: Tensor  # [num_requests * num_next] int64
    rows: Tensor  # [num_requests * num_next] int64: of the level, those of all requests, that each one is a child of


class Tree(NamedTuple):
    token_ids: Tensor  # [num_requests, num_nodes] int64; -1: there is no node
    parents: Tensor  # [num_requests, num_nodes] int64: an earlier node, -1 = the pending token


def add_level(
    tree: TreeCandidates,  # its levels before this one are written
    level: int,
    token_ids: Tensor,  # [num_requests * num_rows, width] int64, or [num_requests, width]: the same for all rows
    log_probs: Tensor,  # as token_ids, float32: of each token given its row, at most 0; a NaN is as -inf
    *,
    num_rows: int,  # of each request: the first places of the level before; 1 in level 0: the pending token
    num_next: int = 0,  # rows of the level behind
) -> NextRows:
    """Write the places of a level with the best of its candidates."""
    num_requests, _, num_places = tree.scores.shape
    before, number = (level - 1) * num_places, num_rows * token_ids.shape[1]
    scores = log_probs.double().view(num_requests, -1, log_probs.shape[1])
    if level > 0:
        scores = tree.scores[:, level - 1, :num_rows].unsqueeze(2) + scores
    scores = scores.flatten(1)
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_places]
    rows = order // token_ids.shape[1]
    given = token_ids.view(num_requests, -1, token_ids.shape[1]).expand(-1, num_rows, -1).flatten(1)
    nobody = max(0, num_places - number)
    parents = before + rows if level > 0 else torch.full_like(rows, -1)
    columns = (given.gather(1, order), 0), (scores.gather(1, order), float("-inf")), (parents, -1)
    for places, (values, missing) in zip(tree, columns, strict=True):
        places[:, level] = torch.nn.functional.pad(values, (0, nobody), value=missing)
    rows = torch.nn.functional.pad(rows, (0, nobody))[:, :num_next]
    firsts = torch.arange(num_requests, device=rows.device).unsqueeze(1) * num_rows
    return NextRows(tree.token_ids[:, level, :num_next].flatten(), (firsts + rows).flatten())


def likeliest_tree(candidates: TreeCandidates, num_nodes: int) -> Tree:
    """The num_nodes best candidates of all levels from the likeliest on; without a probability there is no node."""
    token_ids, scores, parents = (places.flatten(1) for places in candidates)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    # Of each candidate the node that it becomes; the last entry stands for the pending token.
    nodes = torch.full_like(order[:, :1], -1).expand(-1, order.shape[1] + 1).clone()
    nodes.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    chosen = order[:, :num_nodes]
    parents = parents.gather(1, chosen)
    parents = nodes.gather(1, torch.where(parents < 0, order.shape[1], parents))
    is_node = scores.gather(1, chosen) > float("-inf")
    return Tree(
        token_ids=torch.where(is_node, token_ids.gather(1, chosen), -1),
        parents=torch.where(is_node, parents, -1),
    )
