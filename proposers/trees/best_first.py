"""The most probable nodes of all trees over ranked candidates: the shape follows from what the drafter is sure of.

The best-first tree of DFlash blocks (DDTree, arXiv 2604.12989): with one distribution a depth, a node's probability is
the product along its path, and the num_nodes most probable nodes are a tree of their own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch

Path = tuple[int, ...]  # the ranks on the way to a node


def best_first_paths(log_probs: torch.Tensor, num_nodes: Sequence[int]) -> list[list[Path]]:
    """The num_nodes[b] nodes of highest joint probability of each request, fewer where there are no more.

    The likeliest come first, so that the first n are the tree of n nodes.

    The shape depends on the drafter's distributions, not on draws. Candidates are sets without probs, because no rule
    may be given the probs of a tree whose shape depends on what was drawn (DraftTokens).

    Args:
        log_probs: [num_requests, depth, num_candidates], each depth's candidates from the likeliest on. Read to the
            host, where shapes live: the step's one look at the device.
    """
    return [_best_first(own, count) for own, count in zip(log_probs.double().tolist(), num_nodes, strict=True)]


def _best_first(log_probs: list[list[float]], num_nodes: int) -> list[Path]:
    """log_probs: [depth][rank] log-probabilities."""
    paths: list[Path] = []
    # A node comes from the heap after its parent and its earlier siblings, which are as likely at least; of equals the
    # shallower one, then the one of lower ranks comes first.
    waiting: list[tuple[float, int, Path, float]] = []

    def push(path: Path, before: float) -> None:  # before: log-probability of the parent
        depth, rank = len(path), path[-1]
        if (
            depth <= len(log_probs)
            and rank < len(log_probs[depth - 1])
            and (score := log_probs[depth - 1][rank]) > -math.inf
        ):
            heapq.heappush(waiting, (-(before + score), depth, path, before))

    push((0,), 0.0)
    while waiting and len(paths) < num_nodes:
        minus_score, _, path, before = heapq.heappop(waiting)
        paths.append(path)
        push((*path, 0), -minus_score)
        push((*path[:-1], path[-1] + 1), before)
    return paths
