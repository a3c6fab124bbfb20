"""Holds the captured steps of one proposer for each number of drafts that the load allows, made when first needed."""

from __future__ import annotations

from collections.abc import Callable

from runner.metrics import InParts
from runner.whole_steps import WholeSteps


class StepsByLoad:
    def __init__(self, make: Callable[[int], WholeSteps | InParts]) -> None:
        """make: returns the steps that draft so many tokens a request, or why they need the host."""
        self._make = make
        self._made: dict[int, WholeSteps | InParts] = {}

    def __call__(self, max_draft_tokens: int) -> WholeSteps | InParts:
        if max_draft_tokens not in self._made:
            self._made[max_draft_tokens] = self._make(max_draft_tokens)
        return self._made[max_draft_tokens]
