"""Matches that the host finds in the text, in trees of token recycling (proposers/suffix_recycling.py), captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.reference.likeliest_tree import Tree
from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, GoingOn
from proposers.captured.host_drafts import PlacedDrafts
from proposers.captured.recycled import CapturedRecycling
from runner.engine.device_requests import DeviceBatch
from runner.engine.request import DraftTokens, Request
from runner.engine.scheduler import Schedule
from runner.engine.step_operations import match_in_tree


class MatchInTree(CapturedDrafter):
    reads_text = True

    def __init__(
        self,
        *,
        recycling: CapturedRecycling,  # drafts trees
        find_matches: Callable[[Schedule], DraftTokens],  # chains, of at most recycling.num_tokens
        capacity: int,
        device: torch.device,
    ) -> None:
        super().__init__(recycling.num_tokens, tree_depth=recycling.num_tokens)  # a match may take all places
        self._recycling, self._find_matches = recycling, find_matches
        self._matches = PlacedDrafts(capacity, device)

    def start(self, requests: Sequence[Request]) -> None:
        self._recycling.start(requests)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        self._recycling.stop(going_on)

    def find(self, schedule: Schedule) -> DraftTokens:
        return self._find_matches(schedule)

    def place(self, drafts: DraftTokens, places: Sequence[int]) -> int:
        self._matches.put(drafts, places, self.num_tokens)
        return self.num_tokens

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        drafted = self._recycling.draft(batch)
        assert drafted.parents is not None
        tree = Tree(drafted.token_ids, drafted.parents)
        token_ids, parents = match_in_tree(self._matches.of(batch), tree, depth=self._recycling.depth)
        return CapturedDrafts(token_ids, parents=parents)

    def learn_logits(self, batch: DeviceBatch, draft_token_ids: Tensor, logits: Tensor) -> None:
        self._recycling.learn_logits(batch, draft_token_ids, logits)
