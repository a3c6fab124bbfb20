"""A captured drafter around another one, which follows the requests for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from proposers.captured.drafter import CapturedDrafter, GoingOn
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import Request

Drafter = TypeVar("Drafter", bound=CapturedDrafter)


class AroundDrafter(CapturedDrafter, Generic[Drafter]):
    def __init__(self, num_tokens: int, drafter: Drafter, *, tree_depth: int | None = None) -> None:
        """num_tokens, tree_depth: as CapturedDrafter's, of the drafts that are verified."""
        num_scratch_rows = max(0, drafter.reach - num_tokens)
        super().__init__(num_tokens, drafter.max_model_len, num_scratch_rows, tree_depth=tree_depth)
        self.drafter, self.tap_layers, self.draws = drafter, drafter.tap_layers, drafter.draws

    def can_start(self, request: Request) -> bool:
        return self.drafter.can_start(request)

    def start(self, requests: Sequence[Request]) -> None:
        self.drafter.start(requests)

    def stop(self, going_on: Sequence[GoingOn]) -> None:
        self.drafter.stop(going_on)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self.drafter.learn(batch, hidden_states, token_ids)

    def learn_logits(self, batch: DeviceBatch, draft_token_ids: Tensor, logits: Tensor) -> None:
        self.drafter.learn_logits(batch, draft_token_ids, logits)
