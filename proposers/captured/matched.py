"""Drafting with a model where no match in the text is convincing (proposers/hybrid.py), captured.

The host looks for matches before each step. A step has one of three forms: the drafter drafts for all requests; for
none, as all that may draft have matches, and only keeps up; or for those without a match.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from proposers.captured.around import AroundDrafter
from proposers.captured.drafter import CapturedDrafts
from proposers.captured.host_drafts import PlacedDrafts, few_widths
from proposers.captured.token_by_token import CapturedChains
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import DraftTokens
from runner.engine.schedule import Schedule


class Form(enum.Enum):
    DRAFTED = "drafted"
    MATCHED = "matched"
    BOTH = "both"


class MatchedOrDrafted(AroundDrafter[CapturedChains]):
    reads_text = True

    def __init__(
        self,
        num_tokens: int,
        *,
        drafter: CapturedChains,
        find_matches: Callable[[Schedule], DraftTokens],
        source: str,  # the drafter's name
        capacity: int,
        device: torch.device,
    ) -> None:
        """find_matches: matches longer than drafter.num_tokens only where all that may draft have one."""
        super().__init__(num_tokens, drafter)
        self._find_matches = find_matches
        self.form, self.source = Form.DRAFTED, source
        self.num_places, self._is_left = drafter.num_tokens, False
        self._matches = PlacedDrafts(capacity, device)

    def find(self, schedule: Schedule) -> DraftTokens:
        drafts = self._find_matches(schedule)
        counts = zip(drafts.num_draft_tokens, schedule.decoding, strict=True)
        self._is_left = any(count == 0 and item.max_draft_tokens > 0 for count, item in counts)
        return drafts

    def place(self, drafts: DraftTokens, places: Sequence[int]) -> int:
        counts = drafts.num_draft_tokens
        if not any(counts):
            self.form = Form.DRAFTED
            return self.drafter.num_tokens
        self.form = Form.BOTH if self._is_left else Form.MATCHED
        width = self.drafter.num_tokens if self._is_left else few_widths(max(counts), self.num_tokens)
        self._matches.put(drafts, places, width)
        return width

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        if self.form is Form.DRAFTED:
            return self.drafter.draft(batch)
        matches = self._matches.of(batch)
        if self.form is Form.BOTH:
            return self.drafter.draft_beside(batch, matches)
        self.drafter.follow(batch, matches)
        return CapturedDrafts(matches)
