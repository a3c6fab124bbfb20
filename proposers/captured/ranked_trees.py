"""Trees over the distributions of the next depths, captured (proposers/drafting/ranked_trees.py): Medusa, DFlash.

The drafter of chains yields each place's logits, which do not depend on what was drafted in front of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, GoingOn
from proposers.captured.token_by_token import CapturedChains
from proposers.trees.candidates import perturbed_on_device
from proposers.trees.choice_nodes import ChoiceNodes
from proposers.trees.likeliest import Level, Tree, best, likeliest_tree
from proposers.trees.rank_tree import RankTree
from proposers.trees.static import Choices
from proposers.vocabularies.partial import over_target_vocabulary
from runner.engine.device_requests import DeviceBatch
from runner.engine.request import Request


class CapturedRankedTrees(CapturedDrafter):
    """Nodes chosen among each depth's candidates; num_tokens of `chains` is how deep a tree may be."""

    def __init__(self, chains: CapturedChains, *, num_nodes: int) -> None:
        super().__init__(num_nodes, chains.max_model_len, tree_depth=chains.num_tokens)
        self.chains, self.tap_layers = chains, chains.tap_layers

    def can_start(self, request: Request) -> bool:
        return self.chains.can_start(request)

    def start(self, requests: Sequence[Request]) -> None:
        self.chains.start(requests)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        self.chains.stop(going_on)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self.chains.learn(batch, hidden_states, token_ids)

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        chains, last_token_ids = self.chains, batch.last_token_ids[:, 1]
        perturbed = list[Tensor]()
        for place in range(self.depth):
            logits = chains.next_logits(batch, place, last_token_ids) if place else chains.first_logits(batch)
            logits = over_target_vocabulary(logits, chains.known_tokens)
            perturbed.append(
                perturbed_on_device(logits, batch.sampling(batch.lengths + place), chains.draft_sample_method)
            )
        tree = self.choose(perturbed)
        return CapturedDrafts(tree.token_ids, parents=tree.parents)

    @abstractmethod
    def choose(self, logits: Sequence[Tensor]) -> Tree:
        """logits: of each depth [count, vocab], as perturbed_on_device makes them; candidates come highest first."""


class CapturedLikeliestTrees(CapturedRankedTrees):
    """The likeliest nodes, level by level: of each only as many as a tree may have."""

    def choose(self, logits: Sequence[Tensor]) -> Tree:
        levels = list[Level]()
        num_before = 0  # candidates of the levels before the last one
        for own in logits:
            width = min(self.num_tokens, own.shape[1])
            scores, token_ids = own.log_softmax(dim=-1).topk(width, dim=-1)
            level = Level(token_ids=token_ids, scores=scores.double(), parents=torch.full_like(token_ids, -1))
            if levels:
                before = levels[-1]
                joint = (before.scores.unsqueeze(2) + level.scores.unsqueeze(1)).flatten(1)
                kept = best(joint, self.num_tokens)
                level = Level(
                    token_ids=token_ids.gather(1, kept % width),
                    scores=joint.gather(1, kept),
                    parents=num_before + kept // width,
                )
                num_before += before.scores.shape[1]
            levels.append(level)
        return likeliest_tree(levels, self.num_tokens)


class CapturedChoiceTrees(CapturedRankedTrees):
    """The same nodes in every step."""

    def __init__(self, chains: CapturedChains, *, choices: Choices, device: torch.device) -> None:
        super().__init__(chains, num_nodes=len(choices))
        self._widths = RankTree.of_paths(choices).num_candidates
        first = [sum(self._widths[:depth]) for depth in range(len(self._widths))]
        numbers = {path: first[len(path) - 1] + path[-1] for path in choices}
        self._nodes = ChoiceNodes.of(choices, numbers, device)

    def choose(self, logits: Sequence[Tensor]) -> Tree:
        return self._nodes.tree([own.topk(width).indices for own, width in zip(logits, self._widths, strict=True)])
