"""Matches that the host finds in the text, in a drafter's trees (proposers/drafting/matches_in_trees.py), captured.

Where these have fewer nodes than steps have places for drafts, a step without a match is the drafter's own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.reference.likeliest_tree import Tree
from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, GoingOn
from proposers.captured.host_drafts import PlacedDrafts
from runner.engine.device_requests import DeviceBatch
from runner.engine.request import DraftTokens, Request
from runner.engine.scheduler import Schedule
from runner.engine.step_operations import match_in_tree


class Form(enum.Enum):
    DRAFTED = "drafted"
    MATCHED = "matched"


class MatchInTree(CapturedDrafter):
    reads_text = True

    def __init__(
        self,
        num_tokens: int,
        *,
        drafter: CapturedDrafter,  # drafts trees, of no more nodes
        find_matches: Callable[[Schedule], DraftTokens],  # chains, of at most as many tokens as a step has places
        source: str,  # of trees without a match
        num_places: Callable[[int], int],  # of a step with a match and so many requests
        capacity: int,
        device: torch.device,
    ) -> None:
        num_scratch_rows = max(0, drafter.reach - num_tokens)
        super().__init__(num_tokens, drafter.max_model_len, num_scratch_rows, tree_depth=num_tokens)
        self.drafter, self._find_matches, self._num_places_of = drafter, find_matches, num_places
        self.tap_layers, self.draws, self.num_places = drafter.tap_layers, drafter.draws, drafter.num_tokens
        self.form, self.source = Form.MATCHED, source
        self._matches = PlacedDrafts(capacity, device)

    def can_start(self, request: Request) -> bool:
        return self.drafter.can_start(request)

    def start(self, requests: Sequence[Request]) -> None:
        self.drafter.start(requests)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        self.drafter.stop(going_on)

    def find(self, schedule: Schedule) -> DraftTokens:
        return self._find_matches(schedule)

    def place(self, drafts: DraftTokens, places: Sequence[int]) -> int:
        num_own = self.drafter.num_tokens
        # Trees that fill all places have one form: an empty match in them costs less than a second layout.
        is_own = num_own < self.num_tokens and not any(drafts.num_draft_tokens)
        self.form = Form.DRAFTED if is_own else Form.MATCHED
        if is_own:
            return num_own
        width = min(self._num_places_of(len(places)), self.num_tokens)
        self._matches.put(drafts, places, width)
        return width

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        drafted = self.drafter.draft(batch)
        if self.form is Form.DRAFTED:
            return drafted
        assert drafted.parents is not None, "the drafter drafts trees"
        match = self._matches.of(batch)
        lacking = match.shape[1] - self.drafter.num_tokens
        nodes = (drafted.token_ids, drafted.parents)
        tree = Tree(*(pad(own, (0, lacking), value=-1) if lacking else own for own in nodes))
        token_ids, parents = match_in_tree(match, tree, depth=self.drafter.depth)
        return CapturedDrafts(token_ids, parents=parents)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self.drafter.learn(batch, hidden_states, token_ids)

    def learn_logits(self, batch: DeviceBatch, draft_token_ids: Tensor, logits: Tensor) -> None:
        self.drafter.learn_logits(batch, draft_token_ids, logits)
