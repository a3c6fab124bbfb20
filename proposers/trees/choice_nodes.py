"""The nodes of a static tree as tensors: each node's parent, and the candidate that it is.

In the order of the choices, so that the first nodes are those of the smaller tree that is left where room is short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.likeliest_tree import Tree
from proposers.trees.static import Choices
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True, eq=False)
class ChoiceNodes:
    parents: Tensor  # [num_nodes] int64
    numbers: Tensor  # [num_nodes] int64: of each node among the candidates of all levels

    @classmethod
    def of(cls, choices: Choices, numbers: Mapping[tuple[int, ...], int], device: torch.device) -> ChoiceNodes:
        """numbers: of each choice's candidate."""
        node = {path: place for place, path in enumerate(choices)} | {(): -1}
        columns = [[node[path[:-1]] for path in choices], [numbers[path] for path in choices]]
        parents, of_candidates = to_device(columns, torch.int64, device)
        return cls(parents=parents, numbers=of_candidates)

    def tree(self, candidates: Sequence[Tensor]) -> Tree:
        """candidates: of each level, [num_requests, number] int64."""
        token_ids = torch.cat(list(candidates), dim=1).index_select(1, self.numbers)
        return Tree(token_ids=token_ids, parents=self.parents.expand_as(token_ids).contiguous())
