"""Trees over ranked candidates: a node stands for the rank-th likeliest token of its depth, whatever its ancestors are.

Medusa's heads and DFlash's blocks guess in this way: one pass gives one distribution for each depth. Without probs such
trees are sets of candidates, and the target draws (DraftTokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from runner.engine.draft_trees import tree_shape
from runner.engine.request import DraftTokens
from runner.engine.upload import to_device


@dataclass(frozen=True)
class RankTree:
    """Nodes in depth-first order, siblings by rank."""

    parents: tuple[int, ...]  # -1 = the pending token
    ranks: tuple[int, ...]  # of each node among the candidates of its depth, from 0

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each node, from 1."""
        return tree_shape(self.parents).depths

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def num_candidates(self) -> list[int]:
        """Candidates that each depth needs, [depth]."""
        counts = [0] * max(self.depths, default=0)
        for depth, rank in zip(self.depths, self.ranks, strict=True):
            counts[depth - 1] = max(counts[depth - 1], rank + 1)
        return counts

    @classmethod
    def of_paths(cls, paths: Sequence[tuple[int, ...]]) -> RankTree:
        """From the ranks on the way to every node; the paths are distinct, and each one's beginnings are there too."""
        ordered = sorted(paths)  # depth first, siblings by rank
        number = {path: node for node, path in enumerate(ordered)} | {(): -1}
        assert len(number) == len(paths) + 1 and all(path[:-1] in number for path in ordered), "the paths are a tree"
        return cls(tuple(number[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The ranks on the way to each node."""
        return [tuple(self.ranks[node] for node in path) for path in tree_shape(self.parents).paths]


def draft_tokens_from_ranks(trees: Sequence[RankTree], token_ids: torch.Tensor) -> DraftTokens:
    """DraftTokens of one tree a decoding request; reads nothing back.

    token_ids: [num_requests, depth, num_candidates] int64, each depth's candidates by rank, distinct.
    """
    num_requests, num_depths, num_candidates = token_ids.shape
    assert len(trees) == num_requests, "one tree a request"
    index = [
        (b * num_depths + depth - 1) * num_candidates + rank
        for b, tree in enumerate(trees)
        for depth, rank in zip(tree.depths, tree.ranks, strict=True)
    ]
    return DraftTokens(
        token_ids=token_ids.flatten().index_select(0, to_device(index, torch.int64, token_ids.device)),
        cu_num_draft_tokens=[0, *accumulate(tree.num_nodes for tree in trees)],
        parent_indices=[parent for tree in trees for parent in tree.parents],
    )
