"""Trees over the distributions of the next depths, captured (proposers/drafting/ranked_trees.py): Medusa, DFlash.

The drafter of chains yields each place's logits, which do not depend on what was drafted in front of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from kernels.reference.likeliest_tree import Tree, TreeCandidates
from kernels.reference.top_candidates import Candidates
from proposers.captured.around import AroundDrafter
from proposers.captured.drafter import CapturedDrafts
from proposers.captured.token_by_token import CapturedChains
from proposers.trees.choice_nodes import ChoiceNodes
from proposers.trees.rank_tree import RankTree
from proposers.trees.static import Choices
from runner.engine.device_batch import DeviceBatch
from runner.engine.step_operations import add_level, likeliest_tree


class CapturedRankedTrees(AroundDrafter[CapturedChains]):
    """Nodes chosen among each depth's candidates; num_tokens of `chains` is how deep a tree may be."""

    def __init__(self, chains: CapturedChains, *, num_nodes: int) -> None:
        super().__init__(num_nodes, chains, tree_depth=chains.num_tokens)

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        chains, last_token_ids = self.drafter, batch.last_token_ids[:, 1]
        positions = batch.lengths + chains.steps
        levels, path = list[Candidates](), None
        for place in range(self.depth):
            logits = chains.next_logits(batch, place, last_token_ids) if place else chains.first_logits(batch)
            if place and batch.processors is not None:  # they see the first path, as in steps in parts
                path = torch.stack([level.token_ids[:, 0] for level in levels], dim=1)
            levels.append(chains.candidates(batch, logits, positions[place], self.width(place), path))
        tree = self.choose(levels)
        return CapturedDrafts(tree.token_ids, parents=tree.parents)

    @abstractmethod
    def width(self, place: int) -> int:
        """Candidates of a depth."""

    @abstractmethod
    def choose(self, levels: Sequence[Candidates]) -> Tree:
        """levels: of each depth, a row a request."""


class CapturedLikeliestTrees(CapturedRankedTrees):
    """The likeliest nodes: each depth's candidates behind as many of the level before as a tree may have."""

    def width(self, place: int) -> int:
        return self.num_tokens

    def choose(self, levels: Sequence[Candidates]) -> Tree:
        token_ids = levels[0].token_ids
        tree = TreeCandidates.unwritten(len(token_ids), self.depth, self.num_tokens, token_ids.device)
        for level, candidates in enumerate(levels):
            add_level(tree, level, *candidates, num_rows=self.num_tokens if level else 1)
        return likeliest_tree(tree, self.num_tokens)


class CapturedChoiceTrees(CapturedRankedTrees):
    """The same nodes in every step."""

    def __init__(self, chains: CapturedChains, *, choices: Choices, device: torch.device) -> None:
        super().__init__(chains, num_nodes=len(choices))
        self._widths = RankTree.of_paths(choices).num_candidates
        first = [sum(self._widths[:depth]) for depth in range(len(self._widths))]
        numbers = {path: first[len(path) - 1] + path[-1] for path in choices}
        self._nodes = ChoiceNodes.of(choices, numbers, device)

    def width(self, place: int) -> int:
        return self._widths[place]

    def choose(self, levels: Sequence[Candidates]) -> Tree:
        return self._nodes.tree([candidates.token_ids for candidates in levels])
