"""Prompt lookup on the device, captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from proposers.captured.drafter import CapturedDrafter, CapturedDrafts, no_drafts
from proposers.lookup.token_matrix import NOBODY, TokenMatrix
from runner.engine.device_batch import DeviceBatch
from runner.engine.request import Request
from runner.engine.upload import to_device


class CapturedNgram(CapturedDrafter):
    def __init__(
        self,
        num_tokens: int,
        *,
        tokens: TokenMatrix,  # the proposer's own
        match: Callable[[Tensor], Tensor],  # rows [count] int64 -> drafts [count, num_tokens] int64, -1 where none
        capacity: int,
    ) -> None:
        super().__init__(num_tokens)
        self.tokens, self.match = tokens, match
        self._rows = torch.full((capacity,), NOBODY, dtype=torch.int64, device=tokens.device)

    def start(self, requests: Sequence[Request]) -> None:
        rows = to_device(self.tokens.rows_of(requests), torch.int64, self._rows.device)
        self._rows.fill_(NOBODY)
        self._rows[: len(rows)].copy_(rows)

    def draft(self, batch: DeviceBatch) -> CapturedDrafts:
        if self.num_tokens == 0:
            return no_drafts(batch)
        return CapturedDrafts(self.match(self._rows[: batch.count]))

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        self.tokens.append(self._rows[: batch.count], token_ids)
