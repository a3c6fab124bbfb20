"""The captured steps of one proposer, by how many drafts the load allows; made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable

from runner.whole_steps import WholeSteps


class StepsByLoad:
    def __init__(self, make: Callable[[int], WholeSteps | None]) -> None:
        """make: of the drafts a request may have, the steps that draft as many; None: the host has a part in them."""
        self._make = make
        self._made: dict[int, WholeSteps | None] = {}

    def __call__(self, max_draft_tokens: int) -> WholeSteps | None:
        if max_draft_tokens not in self._made:
            self._made[max_draft_tokens] = self._make(max_draft_tokens)
        return self._made[max_draft_tokens]
