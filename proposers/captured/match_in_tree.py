"""Matches that the host finds in the text, in a drafter's trees (proposers/drafting/matches_in_trees.py), captured.

Where these have fewer nodes than steps have places for drafts, a step without a match is the drafter's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from kernels.reference.likeliest_tree import Tree
from proposers.captured.around import AroundDrafter
from proposers.captured.drafter import CapturedDrafter, CapturedDrafts
from proposers.captured.host_drafts import PlacedDrafts
from proposers.captured.matched import Form
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule
from runner.engine.step_operations import match_in_tree


class MatchInTree(AroundDrafter[CapturedDrafter]):
    reads_text = True

    def __init__(
        self,
        num_tokens: int,
        *,
        drafter: CapturedDrafter,  # drafts trees, of no more nodes
        find_matches: Callable[[Schedule], DraftTokens],  # chains, no longer than width_for of its requests
        width_for: Callable[[int], int],  # places of a step with a match, by the number of its requests
        source: str,  # of trees without a match
        capacity: int,
        device: torch.device,
    ) -> None:
        super().__init__(num_tokens, drafter, tree_depth=num_tokens)
        self._find_matches, self._width_for = find_matches, width_for
        self.num_places = drafter.num_tokens
        self.form, self.source = Form.BOTH, source
        self._matches = PlacedDrafts(capacity, device)

    def find(self, schedule: Schedule) -> DraftTokens:
        return self._find_matches(schedule)

    def place(self, drafts: DraftTokens, places: Sequence[int]) -> int:
        width = min(self._width_for(len(places)), self.num_tokens)
        # Trees that fill all places have one form: an empty match in them costs less than a second layout.
        if self.drafter.num_tokens < width and not any(drafts.num_draft_tokens):
            self.form = Form.DRAFTED
            return self.drafter.num_tokens
        self.form = Form.BOTH
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
